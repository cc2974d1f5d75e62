"""Migrations: numbered SQL files, applied once and in order, recorded with the SHA-256 of their text.

A file is `NNNN_name.sql`; statements end with `;` at the end of a line, `--` at the start of a line is a
comment. Every statement can be run again (IF NOT EXISTS, OR REPLACE): a crash inside a file is mended by
running the command again. An applied file never changes: a change is a new file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.store.client import Store
from pipeline.store.errors import MigrationError

FOLDER: Final = Path(__file__).parent / "migrations"
_NAME: Final = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_STATEMENT_END: Final = re.compile(r";[ \t]*(?:\n|$)")

_RECORD: Final = """
CREATE TABLE IF NOT EXISTS schema_migrations
(
    number UInt32,
    file String,
    sha256 String,
    applied_us DateTime64(6, 'UTC')
)
ENGINE = {replicated}ReplacingMergeTree
ORDER BY number
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file."""

    number: int
    file: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the text as it stands in the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def statements(self, replicated: bool) -> list[str]:
        """The statements, in order, for plain or replicated tables."""
        lines = (line for line in self.text.splitlines() if not line.lstrip().startswith("--"))
        text = _templated("\n".join(lines), replicated)
        return [part.strip() for part in _STATEMENT_END.split(text) if part.strip()]


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a run did: files applied now, and those that already were."""

    applied: tuple[str, ...]
    present: tuple[str, ...]


def load(folder: Path = FOLDER) -> list[Migration]:
    """The migrations of a folder in order. Raises MigrationError on a wrong name or a gap in the numbers."""
    migrations = []
    for path in sorted(folder.glob("*.sql")):
        named = _NAME.fullmatch(path.name)
        if named is None:
            raise MigrationError(f"migration {path}: name it NNNN_lower_case.sql")
        migrations.append(Migration(int(named.group(1)), path.name, path.read_text(encoding="utf-8")))
    for expected, migration in enumerate(migrations, start=1):
        if migration.number != expected:
            raise MigrationError(
                f"migration {folder / migration.file}: number {expected:04d} is expected here; "
                "number the files without gaps or repetition"
            )
    return migrations


def migrate(store: Store, *, folder: Path = FOLDER, replicated: bool = False, now_us: int) -> Migrated:
    """Apply what is missing. Blocks. Raises MigrationError if an applied file was edited or is gone.

    `replicated`: tables are Replicated… ones; a server's `default_replica_path` names their place in Keeper.
    """
    migrations = load(folder)
    store.command(_templated(_RECORD, replicated))
    rows = store.rows("SELECT number, file, sha256 FROM schema_migrations FINAL ORDER BY number")
    recorded = {int(number): (str(file), str(sha256)) for number, file, sha256 in rows}
    check(migrations, recorded, folder)
    missing = [migration for migration in migrations if migration.number not in recorded]
    for migration in missing:
        for statement in migration.statements(replicated):
            store.command(statement)
        store.insert(
            "schema_migrations",
            {
                "number": [migration.number],
                "file": [migration.file],
                "sha256": [migration.sha256],
                "applied_us": [now_us],
            },
            token=f"{migration.file}:{migration.sha256}:{now_us}",
        )
    return Migrated(
        tuple(migration.file for migration in missing),
        tuple(migration.file for migration in migrations if migration.number in recorded),
    )


def check(migrations: Sequence[Migration], recorded: Mapping[int, tuple[str, str]], folder: Path) -> None:
    """Raise MigrationError unless what was applied is exactly a first part of what is on disk."""
    by_number = {migration.number: migration for migration in migrations}
    for number, (file, sha256) in sorted(recorded.items()):
        migration = by_number.get(number)
        if migration is None:
            raise MigrationError(
                f"migration {file} was applied to this database but is not in {folder}: the database is "
                "newer than this Klaxon; use the version that wrote it"
            )
        if migration.sha256 != sha256:
            raise MigrationError(
                f"migration {folder / migration.file} was edited after it had been applied "
                f"(SHA-256 {migration.sha256[:12]}…, applied {sha256[:12]}…): restore it and put the change "
                "into a new file"
            )
    if recorded:
        for migration in migrations:
            if migration.number < max(recorded) and migration.number not in recorded:
                raise MigrationError(
                    f"migration {folder / migration.file} comes before applied ones but was never applied; "
                    "give it the next free number"
                )


def _templated(text: str, replicated: bool) -> str:
    return text.replace("{replicated}", "Replicated" if replicated else "")
