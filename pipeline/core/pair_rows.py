"""Scored pairs as they will travel on `klaxon.pairs`, column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from pipeline.core.divergence import ESTIMATOR
from schemas.pairs import PairBatch
from schemas.topics import MAX_RECORD_BYTES

RENORMALISED: Final = f"{ESTIMATOR} renormalised"
"""Estimator named on batches of pairs that were made of logits: never mixed with the others in one mean."""
SCORES: Final = ("kl_lower", "kl_lower_max", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree")
_ROWS_PER_BATCH: Final = 1024
_TEXTS: Final = (
    "rollout",
    "model_version",
    "baseline_version",
    "node",
    "baseline_node",
    "request_type",
)
"""Columns of text here, of indices into the dictionary in a batch."""
_CONSTANTS: Final = ("v", "partition", "offset", "estimator", "dictionary")
_COLUMNS: Final = tuple(name for name in PairBatch.__struct_fields__ if name not in _CONSTANTS)


class PairRows:
    """Rows in log order; comparable pairs and renormalised ones apart."""

    def __init__(self) -> None:
        """None yet."""
        self._columns: dict[str, dict[str, list[Any]]] = {
            estimator: {name: [] for name in _COLUMNS} for estimator in (ESTIMATOR, RENORMALISED)
        }

    def add(self, estimator: str, columns: Mapping[str, list[Any]]) -> None:
        """More rows: every column of PairBatch but the constants, texts as texts."""
        for name, held in self._columns[estimator].items():
            held += columns[name]

    def batches(self, partition: int, offset: int) -> Iterator[PairBatch]:
        """Everything, as records of at most MAX_RECORD_BYTES."""
        encoder = msgspec.msgpack.Encoder()
        for estimator, columns in self._columns.items():
            total = len(columns["arm"])
            todo = [(at, min(at + _ROWS_PER_BATCH, total)) for at in range(0, total, _ROWS_PER_BATCH)]
            todo.reverse()
            while todo:
                first, last = todo.pop()
                batch = _batch(columns, slice(first, last), estimator, partition, offset)
                if last - first > 1 and len(encoder.encode(batch)) > MAX_RECORD_BYTES:
                    middle = (first + last) // 2
                    todo += ((middle, last), (first, middle))
                else:
                    yield batch


def _batch(
    columns: Mapping[str, Sequence[Any]], rows: slice, estimator: str, partition: int, offset: int
) -> PairBatch:
    codes: dict[str, int] = {}

    def coded(texts: Sequence[str | None]) -> list[int | None]:
        return [None if text is None else codes.setdefault(text, len(codes)) for text in texts]

    cut: dict[str, Any] = {name: values[rows] for name, values in columns.items()}
    cut.update({name: coded(cut[name]) for name in _TEXTS})
    return PairBatch(
        v=1, partition=partition, offset=offset, estimator=estimator, dictionary=list(codes), **cut
    )
