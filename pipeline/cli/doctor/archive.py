"""ClickHouse: reachable, and its schema as this version wants it."""

from __future__ import annotations

from pipeline.cli.doctor.findings import Finding
from pipeline.cli.query import answered
from pipeline.config import Config
from pipeline.secret import without_password
from pipeline.store.client import UNKNOWN_DATABASE, UNKNOWN_TABLE
from pipeline.store.errors import FolderInUseError, MigrationError, QueryError, StoreError
from pipeline.store.migrate import FOLDER, check, load

QUERY = "SELECT * FROM schema_migrations FINAL ORDER BY number"
"""Not by name: a column is called like a function that read-only queries may not call."""


def archive_findings(config: Config) -> list[Finding]:
    """Blocks. A chDB folder that an archive worker owns is asked through it, at archive.query_listen."""
    where = f"ClickHouse at {without_password(config.clickhouse.dsn)}"
    try:
        rows = answered(QUERY, config).rows
    except QueryError as error:
        if error.code in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
            return [_behind(where, "no tables of Klaxon's are there")]
        return [_away(where, str(error), "let clickhouse.username read the database")]
    except FolderInUseError as error:
        return [
            Finding(
                severity="note",
                code="not_checked",
                where=where,
                what=str(error),
                remedy="archive.query_listen: 127.0.0.1:8124, for the worker and for this command",
            )
        ]
    except StoreError as error:
        return [
            _away(where, str(error), "start ClickHouse, or correct clickhouse.dsn; decisions go on without")
        ]
    recorded = {int(str(number)): (str(file), str(sha256)) for number, file, sha256, *_ in rows}
    migrations = load()
    try:
        check(migrations, recorded, FOLDER)
    except MigrationError as error:
        return [
            Finding(severity="error", code="schema_differs", where=where, what=str(error), remedy="see above")
        ]
    missing = [migration.file for migration in migrations if migration.number not in recorded]
    return [_behind(where, f"the schema lacks {', '.join(missing)}")] if missing else []


def _behind(where: str, what: str) -> Finding:
    return Finding(severity="error", code="schema_behind", where=where, what=what, remedy="klaxon migrate")


def _away(where: str, what: str, remedy: str) -> Finding:
    told = what.removeprefix(where).lstrip(": ")
    return Finding(severity="error", code="clickhouse_unreachable", where=where, what=told, remedy=remedy)
