"""Scored pairs as they will travel on `klaxon.pairs`, column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence import ESTIMATOR
from pipeline.core.pair_labels import sixteen_bytes
from pipeline.core.pieces import pieces
from pipeline.core.texts import Texts
from schemas.columns import ABSENT, I8
from schemas.pairs import PairBatch
from schemas.topics import MAX_RECORD_BYTES

RENORMALISED: Final = f"{ESTIMATOR} renormalised"
"""Estimator named on batches of pairs that were made of logits: never mixed with the others in one mean."""
SCORES: Final = ("kl_lower", "kl_lower_max", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree")
_ROWS_PER_BATCH: Final = 1024
_ROW_BYTES: Final = 300
"""More than the numbers and identities of one row take."""
_TEXTS: Final = (
    "rollout",
    "model_version",
    "baseline_version",
    "node",
    "baseline_node",
    "request_type",
)
"""Columns of text here, of indices into the dictionary in a batch."""
_ALWAYS_TEXT: Final = ("model_version", "baseline_version")
"""Of these an absent one is the empty text."""
_MAY_BE_ABSENT: Final = ("generation", "first_difference", *_TEXTS)
_CONSTANTS: Final = ("v", "partition", "offset", "estimator", "dictionary")
_NUMBERS: Final = tuple(
    name
    for name in PairBatch.__struct_fields__
    if name not in (*_CONSTANTS, *_TEXTS, "signature", "pair_id", "ended_together", "control_kl_lower")
)

Column: TypeAlias = Texts | NDArray[Any]


class PairRows:
    """Rows in log order; comparable pairs and renormalised ones apart."""

    def __init__(self) -> None:
        """None yet."""
        self._added: dict[str, list[Mapping[str, NDArray[Any]]]] = {ESTIMATOR: [], RENORMALISED: []}
        self._codes: dict[str, int] = {}

    def add(self, estimator: str, columns: Mapping[str, Column]) -> None:
        """More rows: every column of PairBatch but the constants; where a number can be absent, ABSENT.

        `signature` and `pair_id` are (n, 16); `has_pair_id` and `has_control` say which rows have those.
        """
        self._added[estimator].append(
            {
                name: self._coded(name, column) if isinstance(column, Texts) else column
                for name, column in columns.items()
            }
        )

    def __len__(self) -> int:
        """Number of rows."""
        return sum(len(each["arm"]) for added in self._added.values() for each in added)

    def _coded(self, name: str, texts: Texts) -> I8:
        codes = self._codes
        table = [codes.setdefault(text, len(codes)) for text in texts.values]
        table.append(codes.setdefault("", len(codes)) if name in _ALWAYS_TEXT else ABSENT)
        # ABSENT is -1: the last entry.
        coded: I8 = np.array(table, dtype=np.int64)[texts.codes]
        return coded

    def batches(self, partition: int, offset: int) -> Iterator[PairBatch]:
        """Everything, as records of at most MAX_RECORD_BYTES."""
        texts = list(self._codes)
        for estimator, added in self._added.items():
            if not added:
                continue
            columns = {name: np.concatenate([each[name] for each in added]) for name in added[0]}
            make = partial(_batch, columns, texts, estimator, partition, offset)
            for _, batch in pieces(0, len(columns["arm"]), _ROWS_PER_BATCH, make, _is_too_large):
                yield batch


def _is_too_large(batch: PairBatch) -> bool:
    # Whoever sends it encodes it: here it is only when long texts may make it too large.
    most = len(batch.arm) * _ROW_BYTES + sum(4 * len(text) + 5 for text in batch.dictionary)
    return most > MAX_RECORD_BYTES and len(msgspec.msgpack.encode(batch)) > MAX_RECORD_BYTES


def _batch(
    added: Mapping[str, NDArray[Any]],
    texts: Sequence[str],
    estimator: str,
    partition: int,
    offset: int,
    first: int,
    last: int,
) -> PairBatch:
    """Of the rows first..last (exclusive)."""
    columns = {name: column[first:last] for name, column in added.items()}
    coded = np.stack([columns[name] for name in _TEXTS])
    is_used = np.zeros(len(texts) + 1, dtype=np.bool_)
    is_used[coded] = True  # ABSENT is -1: the last entry
    used = np.flatnonzero(is_used[:-1])
    place = np.full(len(texts) + 1, ABSENT, dtype=np.int64)
    place[used] = np.arange(len(used))
    numbers = dict(zip(_TEXTS, place[coded], strict=True)) | {name: columns[name] for name in _NUMBERS}
    held: dict[str, list[Any]] = {name: values.tolist() for name, values in numbers.items()}
    for name in _MAY_BE_ABSENT:
        held[name] = _where(numbers[name] != ABSENT, held[name])
    ended: tuple[bool | None, ...] = (False, True, None)  # ABSENT is -1: the last entry
    held["ended_together"] = [ended[each] for each in columns["ended_together"].tolist()]
    held["signature"] = sixteen_bytes(columns["signature"])
    held["pair_id"] = _where(columns["has_pair_id"], sixteen_bytes(columns["pair_id"]))
    held["control_kl_lower"] = _where(columns["has_control"], columns["control_kl_lower"].tolist())
    return PairBatch(
        v=1,
        partition=partition,
        offset=offset,
        estimator=estimator,
        dictionary=[texts[code] for code in used.tolist()],
        **held,
    )


def _where(present: NDArray[np.bool_], values: list[Any]) -> list[Any]:
    if present.all():
        return values
    if not present.any():
        return [None] * len(values)
    return [value if known else None for value, known in zip(values, present.tolist(), strict=True)]
