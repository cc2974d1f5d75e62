"""Evidence that adds up, through real workers: from the policy file to a step, a trip and its explanation."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.workers import topics
from schemas.topics import Topic
from tests.cli.test_rollout import SPEC, klaxon, written
from tests.kafka.broker import Broker
from tests.kafka.records import Written, now_us, producer, write
from tests.kafka.waiting import eventually
from tests.workers.events import answer, encoded, request
from tests.workers.fleet import SEAT, decisions, fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

POLICY = """rules:
  - {id: adds-up, capability: X4, metric: kl_lower, evidence: anytime, window: 2s, limit: 0.05,
     min_samples: 20, scope: [rollout, node], action: rollback_l1}
  - {id: noise, capability: X3, metric: excess, evidence: anytime, window: 2s, limit: 0.01,
     min_samples: 20, action: rollback_l1, mode: observe}
sequential: {alpha: 0.05}
coverage: {window: 2s, min_samples: 20}
progression: {min_pairs: 50}
"""
WITH_CONTROL = (
    SPEC.replace("arms:", 'arms:\n  control: {model_version: v1, nodes: ["k-*"]}')
    .replace("chat", "r1")
    .replace("v1", "m1")
    .replace("v2", "m2")
)
NEAR = """rules:
  - {id: noise, capability: X3, metric: excess, evidence: anytime, window: 2s, limit: 0.01,
     min_samples: 20, scope: [rollout, node], action: rollback_l1}
  - {id: limit, metric: kl_lower, evidence: anytime, window: 2s, limit: 0.05, min_samples: 20, mode: observe,
     action: rollback_l1}
"""
"""The canary is 0.037 nats from the baseline, where the control is at none: under every absolute limit."""
NEARLY = [[-0.2231, -1.6094]] * 4
SLOW = """rules:
  - {id: slow, capability: G2, metric: ttft_us, statistic: p99, relative_to: baseline, limit: 1.15,
     evidence: anytime, window: 5m, min_samples: 100, scope: stratum, action: rollback_l1}
sequential: {alpha: 0.5}
"""
"""Loose, so that one block of 30 s is enough."""
BLOCK_S = 30
EVERY_S = 0.25
PAIRS_AT_ONCE = 10
ARMS = ("baseline", "canary", "control")
LEAST_PAIRS_OF_A_PASS = 284
"""Of bit-identical answers (statistics.md 0.2)."""


@pytest.mark.kafka
async def test_it_passes_a_step_and_trips_on_kafka(kafka: Broker, log_folder: Path, tmp_path: Path) -> None:
    """And two roll-outs more, whose enforcing rules are the noise floor's and that of slow requests."""
    async with stepped_and_tripped(kafka, log_folder, tmp_path, partial(near_and_slow, kafka, tmp_path)):
        tripped = {name: await eventually(partial(decided, kafka, "trip", name)) for name in ("near", "slow")}
    (by_noise,), (by_blocks,) = tripped["near"], tripped["slow"]
    cause = by_noise["directive"]["cause"]
    assert (cause["rule"], cause["capability"], cause["metric"]) == ("noise", "X3", "excess mean")
    assert cause["value"] == pytest.approx(0.0367, rel=0.02)
    assert (cause["evidence"] >= cause["evidence_bound"], by_noise["directive"]["weights"]["m2"]) == (
        True,
        0.0,
    )
    absolute = [one for one in by_noise["evaluations"] if one["rule"] == "limit"]
    assert absolute
    assert {one["verdict"] for one in absolute} == {"not_enough_data"}, "it alone would have seen nothing"
    cause = by_blocks["directive"]["cause"]
    assert (cause["rule"], cause["capability"], cause["window_us"]) == ("slow", "G2", 300_000_000)
    assert cause["scope"].startswith("stratum=")
    assert (cause["level"], cause["baseline"]) == (pytest.approx(1e5, rel=0.02), pytest.approx(5e4, rel=0.02))
    assert (cause["evidence"] >= cause["evidence_bound"], by_blocks["directive"]["weights"]["m2"]) == (
        True,
        0.0,
    )
    assert (by_blocks["inputs"]["complete_through"] + 1) % BLOCK_S == 0, "judged where a block ends"


@asynccontextmanager
async def near_and_slow(broker: Broker, folder: Path) -> AsyncIterator[None]:
    """Two more roll-outs under traffic, while the body runs."""
    for name, policy in (("near", NEAR), ("slow", SLOW)):
        spec, file = folder / f"{name}.yaml", folder / f"{name}-policy.yaml"
        spec.write_text(WITH_CONTROL.replace("r1", name))
        file.write_text(policy)
        code, _, err = await klaxon(broker, "rollout", "start", str(spec), "--policy", str(file))
        assert code == 0, err
    near, slow = Near(broker), Slow(broker)
    flowing = [asyncio.create_task(one.flow()) for one in (near, slow)]
    try:
        yield
    finally:
        near.stopped = slow.stopped = True
        await asyncio.gather(*flowing)


@pytest.mark.long  # the same as on Kafka; that a gate steps and trips on this broker the demo's tests show
async def test_it_passes_a_step_and_trips_on_the_embedded_broker(
    embedded: Broker, log_folder: Path, tmp_path: Path
) -> None:
    await topics.create(embedded.config)
    async with stepped_and_tripped(embedded, log_folder, tmp_path):
        pass


@asynccontextmanager
async def stepped_and_tripped(
    broker: Broker,
    log_folder: Path,
    tmp_path: Path,
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> AsyncIterator[None]:
    """Afterwards the workers still stand. `beside`: what else goes on, until the body ends."""
    spec = written(tmp_path, WITH_CONTROL)
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    code, out, err = await klaxon(broker, "policy", "check", str(policy), "--json")
    assert (code, json.loads(out)["alpha"]["rules"][0]["evidence_bound"]) == (0, 20.0), out + err
    traffic = Traffic(broker)
    async with fleet(broker, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        async with beside():
            code, _, err = await klaxon(broker, "rollout", "start", spec, "--policy", str(policy))
            assert code == 0, err
            flowing = asyncio.create_task(traffic.flow())
            try:
                lacking = await eventually(partial(lacks_pairs, broker))
                (step, *_) = await eventually(partial(decided, broker, "step", "r1"))
                traffic.sick = True
                (trip,) = await eventually(partial(decided, broker, "trip", "r1"))
            finally:
                traffic.stopped = True
                await flowing
            _, told, _ = await klaxon(broker, "explain", "r1")
            yield
    assert re.search(r"K [\d.]+ of 20: about \d+ more pairs", lacking), lacking
    assert step["directive"]["weights"] == {"m1": 95.0, "m2": 5.0}
    # Everything else that a step needs is there after 5 s, some 200 pairs.
    assert traffic.sent_through(step["inputs"]["complete_through"]) >= LEAST_PAIRS_OF_A_PASS
    cause = trip["directive"]["cause"]
    assert (cause["rule"], cause["capability"], trip["directive"]["weights"]["m2"]) == ("adds-up", "X4", 0.0)
    assert cause["evidence"] >= cause["evidence_bound"] == 20.0
    # Canary minus control, prompt by prompt, with the pair worker's own cells.
    (noise,) = (one for one in trip["evaluations"] if one["rule"] == "noise" and one["scope"] == "rollout")
    assert (noise["verdict"], noise["metric"], noise["value"] > 0.01) == ("trip", "excess mean", True), noise
    (quiet,) = (one for one in step["evaluations"] if one["rule"] == "noise" and one["scope"] == "rollout")
    assert (quiet["samples"] >= 20, abs(quiet["value"]) < 0.01) == (True, True), quiet
    assert re.search(r"rule adds-up \(X4\).*evidence", told), told


async def decided(broker: Broker, kind: str, rollout: str) -> list[dict[str, Any]]:
    """Decisions of one kind about one roll-out."""
    return [one for one in await decisions(broker, kind) if one["directive"]["rollout"] == rollout]


async def lacks_pairs(broker: Broker) -> str:
    """What status says of r1's test for a pass that lacks pairs; "" if it does not."""
    _, out, _ = await klaxon(broker, "status", "--json")
    rules = [
        rule
        for standing in json.loads(out)["rollouts"]
        if standing["rollout"] == "r1"
        for rule in (standing.get("progress") or {}).get("rules", ())
    ]
    return next((rule["reason"] for rule in rules if rule.get("more_pairs")), "")


@dataclass
class Flow:
    """Records of one roll-out, some at a time."""

    broker: Broker
    stopped: bool = False

    async def flow(self) -> None:
        """Until it is stopped."""
        async with producer(self.broker) as client:
            for turn in itertools.count():
                if self.stopped:
                    return
                await write(client, self.made(turn, now_us()))
                await asyncio.sleep(EVERY_S)

    def made(self, turn: int, ts_us: int) -> list[Written]:
        """What it sends in this turn."""
        raise NotImplementedError


@dataclass
class Traffic(Flow):
    """Answers of every arm, a record of each at a time; while `sick`, the canary's are bad."""

    sick: bool = False
    sent: Counter[int] = field(default_factory=Counter)
    """Pairs by their second."""

    def made(self, turn: int, ts_us: int) -> list[Written]:
        names = [f"p{turn}-{number}" for number in range(PAIRS_AT_ONCE)]
        halves = [
            [
                answer(ts_us, arm, name, bad=self.sick and arm == "canary", expected_arms=list(ARMS))
                for name in names
            ]
            for arm in ARMS
        ]
        self.sent[ts_us // 1_000_000] += PAIRS_AT_ONCE
        return [Written(Topic.LOGITS, encoded(one), partition=0) for one in halves]

    def sent_through(self, second: int) -> int:
        """Pairs of this second and before it."""
        return sum(count for one, count in self.sent.items() if one <= second)


class Near(Flow):
    """Answers of every arm of the roll-out `near`."""

    def made(self, turn: int, ts_us: int) -> list[Written]:
        written = []
        for arm in ARMS:
            changes = {"rollout": "near", "expected_arms": list(ARMS)}
            if arm == "canary":
                changes |= {"top_logprobs": NEARLY}
            halves = [answer(ts_us, arm, f"n{turn}-{at}", **changes) for at in range(PAIRS_AT_ONCE)]
            written.append(Written(Topic.LOGITS, encoded(halves), partition=0))
        return written


class Slow(Flow):
    """Requests of the roll-out `slow`: the canary's take twice as long."""

    def made(self, turn: int, ts_us: int) -> list[Written]:
        made = [
            request(
                ts_us, rollout="slow", arm=arm, node=f"{arm}-1", model_version=version, ttft_us=ttft_us,
                pair_id=f"{arm}{turn}-{at}", shadow=arm == "canary",
            )
            for arm, version, ttft_us in (("baseline", "m1", 50_000), ("canary", "m2", 100_000))
            for at in range(20)
        ]  # fmt: skip
        return [Written(Topic.REQUESTS, encoded(made), partition=0)]
