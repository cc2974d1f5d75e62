"""A canary with the baseline's log-probabilities, bit for bit, passes: from the wire to the weight step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.core.gate.explanation import explain
from pipeline.core.gate.explanation_reasons import Account
from pipeline.core.pairing import PairSource
from pipeline.core.source import ContentSettings, RecordMeta
from schemas.buckets import FinalBuckets, PopulationCells
from schemas.codec import decode_logits, encode_logits, logit_columns
from schemas.columns import BatchHeader
from schemas.events import Arm, LogitEvent
from schemas.records import read_msgpack
from schemas.topics import COLUMNS, Topic
from tests.core.gate.build import NAME, T0, Bench, decisions, quick_requests, us

PAIRS = 10
VERSIONS: dict[Arm, str] = {"baseline": "v1", "canary": "v2"}
# A sure token, a spread, a tie at the cut, and what float32 says of certainty.
LISTS = (
    (-0.0001, -9.7, -11.2, -12.0, -13.1),
    (-1.2, -1.5, -1.9, -2.2, -2.8),
    (-0.4, -1.8, -3.5, -3.5, -3.5),
    (0.0, -math.inf, -math.inf, -math.inf, -math.inf),
)


def answer(arm: Arm, number: int) -> LogitEvent:
    ident = f"{number:032x}"
    return LogitEvent(
        v=1, rollout=NAME, generation=1, arm=arm, pair_id=ident, signature=ident, ts_us=us(T0), duration_us=0,
        node=f"{arm}-1", input_tokens=3_000, model_version=VERSIONS[arm], request_type="chat",
        expected_arms=("baseline", "canary"), definition="raw", source="forced", precision="f32",
        tokens=(0,) * len(LISTS), top_ids=((0, 1, 2, 3, 4),) * len(LISTS), top_logprobs=LISTS,
    )  # fmt: skip


def scored() -> list[PopulationCells]:
    """One second of pairs as the pair worker publishes it."""
    content = ContentSettings(gating_partitions=1)
    events = [answer(arm, number) for number in range(PAIRS) for arm in VERSIONS]
    wire = encode_logits(logit_columns(events), BatchHeader("test", 0, {}))
    source = PairSource(Topic.LOGITS, 0, content)
    source.read(RecordMeta(0, us(T0), len(wire)), decode_logits(wire, COLUMNS))
    source.read(RecordMeta(1, us(T0 + 1) + content.lateness_us + 1_000, 0), None)
    finals = [read_msgpack(one.value, FinalBuckets) for one in source.take_flush().finals]
    (second,) = (one for final in finals for one in final.seconds if one.second == T0)
    return second.contents


@pytest.mark.filterwarnings("error")
def test_a_perfect_canary_passes_without_a_warning() -> None:
    with np.errstate(all="raise"):
        populations = scored()
    canary = next(one for one in populations if one.population and one.population.arm == "canary")
    whole = next(cell for cell in canary.cells if cell.dimension == "all")
    assert whole.counters["pairs"] == PAIRS
    held = whole.measures["kl_lower"]
    assert (held.sum, held.min, held.max, held.bins, held.counts) == (0, 0, 0, [0], [PAIRS])
    for measure in whole.measures.values():
        assert all(math.isfinite(value) for value in (measure.sum, measure.min, measure.max))
    bench = Bench.started()
    bench.run(T0, T0 + 400, lambda _second: populations, quick_requests())
    said = [one for one in decisions(bench.effects) if one.kind != "command"]
    assert [(one.kind, one.reason) for one in said] == [("step", "pass at 1 %: now 5 %")]
    (divergence,) = (
        one for one in said[0].evaluations if (one.rule, one.scope) == ("G3-divergence", "rollout")
    )
    assert (divergence.verdict, divergence.value, divergence.samples) == ("pass", 0.0, 300 * PAIRS)
    account = Account(NAME, said[0], spec=bench.core._runs[NAME].spec, policy=bench.core._runs[NAME].policy)
    assert "mean kl_lower 0 nats (limit 0.05 nats) from 3,000 pairs" in explain(account).text
