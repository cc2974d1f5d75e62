"""Archive workers with a known defect: `python -m tests.faults.bad_archives DEFECT`. Each must be found.

Besides its defect the process is `klaxon worker archive`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from pipeline.store import archive, client


def believes_every_answer() -> None:
    """Whatever has status 200 is a success: the driver's own idea of one."""

    def says_all_written(_answer: object, _rows: int) -> bool:
        return True

    client.says_all_written = says_all_written


def retries_without_token_or_counting() -> None:
    """An insert that failed is sent again as if it were a new one, and nobody counts."""
    insert = client.Store.insert
    sent = [0]

    def insert_anew(self: client.Store, table: str, columns: Any, token: str) -> bool:
        sent[0] += 1
        insert(self, table, columns, f"{token}:{sent[0]}")
        return True

    def counted(_self: archive.Archive, _block: object) -> None:
        return None

    client.Store.insert = insert_anew  # type: ignore[method-assign]
    archive.Archive._missing = counted  # type: ignore[method-assign]


def commits_before_the_insert() -> None:
    """The commit does not wait for the table, and a new process believes the commit."""
    store = archive.Archive.store_block

    def store_later(self: archive.Archive, block: Any, stop: threading.Event) -> bool:
        threading.Thread(target=store, args=(self, block, stop), daemon=True).start()
        return True

    archive.Archive.store_block = store_later  # type: ignore[method-assign]


DEFECTS: Final[dict[str, Callable[[], None]]] = {
    "believes_every_answer": believes_every_answer,
    "retries_without_token_or_counting": retries_without_token_or_counting,
    "commits_before_the_insert": commits_before_the_insert,
}


def main() -> None:
    """Break this process, then be the worker."""
    DEFECTS[sys.argv[1]]()
    from pipeline.cli.main import main as klaxon

    sys.argv = ["klaxon", "worker", "archive"]
    klaxon()


if __name__ == "__main__":
    main()
