"""What the store raises. Messages name the thing, the place and the remedy."""

from __future__ import annotations

from pipeline.errors import PipelineError


class StoreError(PipelineError):
    """Root of the store's errors."""


class StoreUnavailableError(StoreError):
    """ClickHouse cannot be reached now; trying again later may help."""


class FolderInUseError(StoreUnavailableError):
    """Another process owns the chDB folder."""


class QueryError(StoreError):
    """ClickHouse refused a statement. `code` is ClickHouse's error code, None where it gave none."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class RowError(StoreError):
    """Rows do not fit their table's columns: a defect of ours, trying again cannot help."""


class MigrationError(StoreError):
    """The migrations on disk and those applied disagree; the message names the file."""
