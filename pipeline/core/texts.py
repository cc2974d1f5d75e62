"""Labels of many events as numbers: the dictionaries of several records brought to one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from schemas.columns import ABSENT, I8, NO_LABEL, U1, LabelColumn

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Texts:
    """One label of n events: `values[codes[i]]`, values distinct; absent where the code is ABSENT."""

    values: Sequence[str]
    codes: I8

    def __getitem__(self, rows: I8) -> Texts:
        return Texts(self.values, self.codes[rows])

    def tolist(self) -> list[str | None]:
        """The label of every event."""
        table = (*self.values, None)  # ABSENT is -1: the last entry
        return [table[code] for code in self.codes.tolist()]


def joined(columns: Sequence[LabelColumn]) -> Texts:
    """The rows of several columns, one column after the other."""
    if not any(column.values for column in columns):
        return Texts((), np.full(sum(len(column.codes) for column in columns), ABSENT, dtype=np.int64))
    codes: dict[str, int] = {}
    table: list[int] = []
    begins: list[int] = []
    for column in columns:
        begins.append(len(table))
        table += [codes.setdefault(text, len(codes)) for text in column.values]
    table.append(ABSENT)
    own = np.concatenate([column.codes for column in columns])
    at = own + np.repeat(begins, [len(column.codes) for column in columns])
    at[own == NO_LABEL] = len(table) - 1
    return Texts(list(codes), np.array(table, dtype=np.int64)[at])


def digests(texts: Texts) -> U1:
    """(n, DIGEST_BYTES) bytes that stand for each event's text; every event must have one."""
    table = np.frombuffer(b"".join([_digest(text) for text in texts.values]), dtype=np.uint8)
    return table.reshape(-1, DIGEST_BYTES)[texts.codes]


@lru_cache(maxsize=4096)
def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]
