"""`klaxon migrate`: create the archive's tables and views, or bring them up to date."""

from __future__ import annotations

import time

import click
import orjson

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config
from pipeline.store.client import connect
from pipeline.store.errors import StoreError, StoreUnavailableError
from pipeline.store.migrate import Migrated
from pipeline.store.migrate import migrate as apply_migrations


@click.command(epilog="Example: klaxon migrate --config klaxon.yaml")
@click.option("--replicated", is_flag=True, help="Replicated tables, for a ClickHouse cluster.")
@config_option
@json_option
def migrate(config: Config, as_json: bool, replicated: bool) -> None:
    """Create the ClickHouse database, tables and views, or bring them up to date.

    Applies the numbered SQL files that are not applied yet, in order, and records each. Running it again
    changes nothing. Refuses with exit code 2 if a file was edited after it had been applied.
    """
    clickhouse = config.clickhouse
    try:
        store = connect(
            clickhouse.dsn,
            clickhouse.database,
            username=clickhouse.username,
            password=clickhouse.password.reveal(),
            create_database=True,
        )
        try:
            done = apply_migrations(store, replicated=replicated, now_us=time.time_ns() // 1000)
        finally:
            store.close()
    except StoreUnavailableError as error:
        raise CommandError(str(error), Exit.UNREACHABLE) from None
    except StoreError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    _show(done, clickhouse.database, as_json)


def _show(done: Migrated, database: str, as_json: bool) -> None:
    if as_json:
        result = {"database": database, "applied": done.applied, "present": done.present}
        click.echo(orjson.dumps(result))
        return
    for file in done.applied:
        click.echo(f"applied {file}")
    click.echo(f"database {database}: {len(done.applied)} applied, {len(done.present)} present before")
