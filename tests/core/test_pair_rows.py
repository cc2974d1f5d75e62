"""Records of scored pairs: their size, their dictionaries, what is absent."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from pipeline.core.divergence import ESTIMATOR
from pipeline.core.pair_rows import _ROW_BYTES, RENORMALISED, PairRows
from pipeline.core.texts import Texts
from schemas.columns import ABSENT
from schemas.pairs import PairBatch
from schemas.topics import MAX_RECORD_BYTES

TEXTS = ("rollout", "model_version", "baseline_version", "node", "baseline_node", "request_type")
LARGE = 1 << 62
NOT_NUMBERS = ("signature", "pair_id", "ended_together", "control_kl_lower", "late")


def columns(n: int, nodes: list[str], **changes: Any) -> dict[str, Any]:
    """n rows whose numbers are as long as numbers can be."""
    numbers = [
        name for name in PairBatch.__struct_fields__[5:] if name not in TEXTS and name not in NOT_NUMBERS
    ]
    texts = {name: Texts(["t"], np.zeros(n, dtype=np.int64)) for name in TEXTS}
    identities = np.arange(n * 16, dtype=np.uint8).reshape(n, 16)
    return {
        **texts,
        **{name: np.full(n, LARGE) for name in numbers},
        "node": Texts(nodes, np.arange(n, dtype=np.int64) % len(nodes)),
        "signature": identities,
        "pair_id": identities[::-1],
        "has_pair_id": np.ones(n, dtype=np.bool_),
        "ended_together": np.ones(n, dtype=np.int8),
        "late": np.zeros(n, dtype=np.bool_),
        "control_kl_lower": np.full(n, LARGE),
        "has_control": np.ones(n, dtype=np.bool_),
        **changes,
    }


def test_a_row_takes_no_more_than_is_reckoned() -> None:
    rows = PairRows()
    rows.add(ESTIMATOR, columns(1000, ["n"]))
    (batch,) = rows.batches(7, LARGE)
    assert len(msgspec.msgpack.encode(batch)) <= 1000 * _ROW_BYTES


def test_long_texts_make_more_records_and_lose_nothing() -> None:
    nodes = [f"{number:04}" + "é" * 1_000 for number in range(1_500)]
    rows = PairRows()
    rows.add(ESTIMATOR, columns(1_000, nodes[:1_000]))
    rows.add(ESTIMATOR, columns(500, nodes[1_000:]))
    batches = list(rows.batches(7, 9))
    assert len(batches) > 2
    assert all(len(msgspec.msgpack.encode(batch)) <= MAX_RECORD_BYTES for batch in batches)
    assert [batch.dictionary[code] for batch in batches for code in batch.node] == nodes


def test_each_record_holds_the_texts_it_uses_and_estimators_stay_apart() -> None:
    rows = PairRows()
    rows.add(ESTIMATOR, columns(2, ["a", "b", "unused"]))
    rows.add(RENORMALISED, columns(1, ["c"]))
    plain, other = rows.batches(7, 9)
    assert (plain.estimator, sorted(plain.dictionary)) == (ESTIMATOR, ["a", "b", "t"])
    assert (other.estimator, sorted(other.dictionary)) == (RENORMALISED, ["c", "t"])
    assert list(PairRows().batches(7, 9)) == []


def test_what_is_absent_is_none_and_an_absent_version_is_empty() -> None:
    some = np.array([ABSENT, 3])
    half = np.array([False, True])
    rows = PairRows()
    rows.add(
        ESTIMATOR,
        columns(
            2,
            ["n"],
            generation=some,
            first_difference=some,
            request_type=Texts(["chat"], np.array([ABSENT, 0])),
            model_version=Texts(["m"], np.array([ABSENT, 0])),
            ended_together=np.array([ABSENT, 0]),
            has_pair_id=half,
            has_control=half,
            control_kl_lower=np.array([5, -1]),
        ),
    )
    (batch,) = rows.batches(7, 9)
    assert (batch.generation, batch.first_difference) == ([None, 3], [None, 3])
    assert (batch.ended_together, batch.control_kl_lower) == ([None, False], [None, -1])
    assert batch.pair_id == [None, bytes(range(16))]
    assert batch.request_type[0] is None
    assert batch.dictionary[batch.request_type[1] or 0] == "chat"
    assert [batch.dictionary[code] for code in batch.model_version] == ["", "m"]
