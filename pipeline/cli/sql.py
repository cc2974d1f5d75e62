"""`klaxon sql`: read-only queries of the archive, wherever it is."""

from __future__ import annotations

from typing import Final

import click
import orjson
from rich.console import Console
from rich.table import Table

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.cli.query import answered
from pipeline.config import Config
from pipeline.core.visible import visible
from pipeline.store.archive import TABLES
from pipeline.store.client import UNKNOWN_TABLE
from pipeline.store.errors import QueryError, StoreError, StoreUnavailableError
from pipeline.store.queries import QueryResult

NOT_A_TERMINAL_COLUMNS: Final = 200
MANY_COLUMNS: Final = 16
"""Rows with more columns are shown one column a line."""

EXAMPLE = """\b
Example: klaxon sql "SELECT arm, count() FROM v_inference_log GROUP BY arm"
More: docs/archive.md"""


@click.command(epilog=EXAMPLE)
@click.argument("query")
@config_option
@json_option
def sql(query: str, config: Config, as_json: bool) -> None:
    """Run one read-only QUERY on the archive: a server, or chDB in a folder.

    While the archive worker runs on a chDB folder the query goes through it, at archive.query_listen.
    """
    try:
        result = answered(query, config)
    except StoreUnavailableError as error:
        raise CommandError(str(error), Exit.UNREACHABLE) from None
    except QueryError as error:
        ours = any(f"'{prefix}{table}'" in str(error) for table in TABLES.values() for prefix in ("", "v_"))
        hint = "; create it with `klaxon migrate`" if error.code == UNKNOWN_TABLE and ours else ""
        raise CommandError(f"{error}{hint}", Exit.USAGE) from None
    except StoreError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if as_json:
        click.echo(orjson.dumps(result.as_json()))
    else:
        _show(result)


def _show(result: QueryResult) -> None:
    console = Console(width=None if click.get_text_stream("stdout").isatty() else NOT_A_TERMINAL_COLUMNS)
    if len(result.names) > MANY_COLUMNS:
        width = max(map(len, result.names))
        for number, row in enumerate(result.rows, start=1):
            console.print(f"row {number}", style="bold")
            for name, value in zip(result.names, row, strict=True):
                console.print(f"{name:>{width}}  {_text(value)}", markup=False, highlight=False)
    else:
        _show_table(result, console)
    click.echo(f"{len(result.rows)} row{'' if len(result.rows) == 1 else 's'}", err=True)


def _show_table(result: QueryResult, console: Console) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for name, kind in zip(result.names, result.types, strict=True):
        numeric = kind.startswith(("UInt", "Int", "Float", "Decimal", "Nullable(Int", "Nullable(UInt"))
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", header_style="bold")
    for row in result.rows:
        table.add_row(*map(_text, row))
    console.print(table, markup=False, highlight=False)


def _text(value: object) -> str:
    if value is None:
        return "NULL"
    return visible(value, keep="\n\t") if isinstance(value, str) else orjson.dumps(value).decode()
