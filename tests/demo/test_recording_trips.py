"""The shipped recording: its fault trips in the right cell, the same with a healthy canary does not."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from pipeline.cli.demo import command
from pipeline.cli.demo.measure_recording import Measured, measure
from pipeline.cli.demo.recording import SHIPPED, SIDES, Recording, read_recording
from pipeline.cli.demo.report import FAULTY_CELL
from pipeline.cli.demo.run import FAULT_AT
from tests.demo.offline import drill

POLICY = (Path(command.__file__).parent / "policy.yaml").read_text(encoding="utf-8")


@lru_cache
def shipped() -> Recording:
    return read_recording(SHIPPED)


@lru_cache
def measured() -> dict[tuple[str, str], Measured]:
    return {(row.side, row.variant): row for row in measure(shipped())}


def test_the_recording_is_compact_and_has_thirty_prompts_on_each_side() -> None:
    assert SHIPPED.stat().st_size <= 500_000
    for side in SIDES:
        assert len(shipped().prompts[side]) >= 30
        first_tokens = {prompt.answers["baseline"].tokens for prompt in shipped().prompts[side]}
        assert len(first_tokens) > 10


def test_healthy_variants_are_near_nothing_and_the_fault_is_far_over_the_limit() -> None:
    rows = measured()
    for side in SIDES:
        for variant in ("healthy", "control"):
            assert rows[side, variant].kl_lower < 0.005
    assert rows["long", "fault"].kl_lower > 0.1


def test_halves_of_a_pair_are_never_further_apart_than_the_join_timeout() -> None:
    for side in SIDES:
        for prompt in shipped().prompts[side]:
            durations = [answer.duration_us for answer in prompt.answers.values()]
            assert max(durations) - min(durations) < 2_000_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.long) for seed in range(10)]
)
def test_the_fault_trips_in_its_cell_and_the_healthy_canary_climbs(seed: int) -> None:
    requests, speed = 4_400, command.DEFAULT_SPEED
    bad = drill(shipped(), POLICY, seed, requests=requests, speed=speed, fault_from=int(requests * FAULT_AT))
    trips = [decision for decision in bad.decisions if decision.kind == "trip"]
    assert len(trips) == 1
    assert bad.directive is not None
    assert bad.directive.state == "tripped"
    assert bad.directive.weights["smol-2"] == 0
    cause = bad.directive.cause
    assert cause is not None
    assert cause.located is not None
    assert (cause.located.dimension, cause.located.value) == ("node_context", FAULTY_CELL)

    good = drill(shipped(), POLICY, seed, requests=requests, speed=speed, fault_from=None)
    assert [decision.kind for decision in good.decisions if decision.kind == "trip"] == []
    assert "step" in [decision.kind for decision in good.decisions]
