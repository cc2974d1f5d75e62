"""G6, the drill, in event time: recorded answers through the real sources, judged by real gates.

100,000 requests at 1,200/s, 5 % of them mirrored to the canary; one of its ten nodes bites prompts over 2,048
tokens only. Lengths of the Azure code trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from pipeline.policy_file import shipped_policy_text
from schemas.buckets import FinalBuckets
from schemas.columns import F8, I8
from schemas.control import Cause, Decision
from schemas.topics import Topic
from tests.core.gate.build import shipped_without
from tests.simulation.answers import SECOND_US, START_US, drawn, halves, recorded_answers, request, spec
from tests.simulation.chain import Chain
from tests.simulation.scores import FAULTY, HEALTHY, HEALTHY_MEAN
from tests.simulation.traffic import TTFT_MEDIAN_US, TTFT_SIGMA, Fault, affected, context_lengths, seed

REQUESTS: Final = 100_000
RATE: Final = 1_200
MIRRORED: Final = 0.05
NODES: Final = 10
FAULT: Final = Fault(0.14, nodes=1, over_tokens=2048)
CELL: Final = "c-00|>2048"
SCOPES: Final = "scope: [rollout, node, context, node_context, request_type]"
STEP_US: Final = 200_000
"""Records are appended, flushed and judged so often."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order of their arrival, in µs from the start; who is mirrored, who affected."""

    at_us: I8
    ttft_us: I8
    node: I8
    tokens: I8
    mirrored: I8
    """Numbers of those that the canary answers, too."""
    hit: I8
    """Of the mirrored ones, those that the fault bites."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one gate ended the drill. Times in seconds from its start."""

    at_s: float
    decision: Decision
    cause: Cause
    affected: int
    """Affected pairs that had been scored by then."""
    since_hundredth_s: float
    """Since the 100th affected pair: negative where it was not needed."""


@dataclass(frozen=True, slots=True)
class Drill:
    """What the drill gave."""

    traffic: Traffic
    verdicts: Mapping[str, Verdict | None]
    baseline_ttft: Mapping[int, int]
    """Bin → user requests of the baseline, all of them."""
    baseline_errors: int


def policies() -> dict[str, str]:
    """The shipped policy, and what of it finds the fault how: its point rule judged in few places alone, and
    its anytime rule alone."""
    return {
        "shipped": shipped_policy_text(),
        "G3-divergence in node × context alone": _scoped("scope: [rollout, node_context]"),
        "G3-divergence in the whole alone": _scoped("scope: rollout"),
        "G3-anytime alone": shipped_without("G3-divergence"),
    }


def _scoped(scope: str) -> str:
    text = shipped_without("G3-anytime")
    assert text.count(SCOPES) == 1
    return text.replace(SCOPES, scope)


def table(played: Drill) -> str:
    """How each policy ended the drill, as Markdown."""
    lines = [
        "| policy | weight 0 after | affected pairs scored by then | named |",
        "| --- | --: | --: | --- |",
    ]
    for name, verdict in played.verdicts.items():
        if verdict is None:
            lines.append(f"| {name} | never | {len(played.traffic.hit)} | |")
            continue
        cause = verdict.cause
        where = f"`{cause.scope}`, {cause.samples} samples"
        if cause.located is not None:
            where += f", located in `{cause.located.dimension}={cause.located.value}`"
        lines.append(f"| {name} | {verdict.at_s:.1f} s | {verdict.affected} | {where} |")
    return "\n".join(line.replace("|>", "\\|>") for line in lines)


def traffic(number: int, shared: Path) -> Traffic:
    """The drill's traffic of one seed."""
    draw = seed(6, number)
    at_us = np.arange(REQUESTS, dtype=np.int64) * SECOND_US // RATE
    ttft: F8 = draw.lognormal(np.log(TTFT_MEDIAN_US), TTFT_SIGMA, REQUESTS)
    tokens = draw.choice(context_lengths(shared, "code"), REQUESTS)
    node = draw.integers(0, NODES, REQUESTS)
    mirrored = np.sort(draw.choice(REQUESTS, round(MIRRORED * REQUESTS), replace=False))
    hit = affected(FAULT, node[mirrored], tokens[mirrored])
    return Traffic(at_us, np.rint(ttft).astype(np.int64), node, tokens, mirrored, mirrored[hit])


def play(number: int, shared: Path, policies: Mapping[str, str], *, faulty: bool = True) -> Drill:
    """The whole drill, a gate per policy; the canary's answers are the recorded ones."""
    made = traffic(number, shared)
    draw = seed(6, number, 1)
    healthy, broken = recorded_answers(shared, HEALTHY), recorded_answers(shared, FAULTY)
    n = len(made.mirrored)
    healthy_runs, broken_runs = drawn(draw, healthy, n, HEALTHY_MEAN), drawn(draw, broken, n, FAULT.mean)
    is_hit = np.isin(made.mirrored, made.hit) if faulty else np.zeros(n, dtype=np.bool_)
    # An answer is there, and mirrored, when its first token is.
    step = (made.at_us + made.ttft_us) // STEP_US
    order = np.argsort(step, kind="stable")
    slots = {int(number): slot for slot, number in enumerate(made.mirrored)}
    chain = Chain(spec(), policies, START_US)
    steps = int(step.max()) + 1
    bounds = np.searchsorted(step[order], np.arange(steps + 1)).tolist()
    for at in range(steps):
        requests, logits = [], []
        for one in order[bounds[at] : bounds[at + 1]].tolist():
            label = {
                "at_us": int(made.at_us[one]), "node": int(made.node[one]), "tokens": int(made.tokens[one]),
                "request_type": one % 2, "number": one,
            }  # fmt: skip
            ttft_us = int(made.ttft_us[one])
            requests.append(request("baseline", ttft_us=ttft_us, shadow=False, **label))
            slot = slots.get(one)
            if slot is not None:
                requests.append(request("canary", ttft_us=ttft_us, shadow=True, **label))
                answers, runs = (broken, broken_runs) if is_hit[slot] else (healthy, healthy_runs)
                logits += halves(answers, int(runs[slot]), duration_us=ttft_us, **label)
        chain.append(START_US + (at + 1) * STEP_US, requests, logits)
    chain.close()
    formed_us = np.sort((step[made.hit] + 1) * STEP_US)
    verdicts = {name: _verdict(chain.tripped(name), formed_us) for name in policies}
    return Drill(made, verdicts, *_baseline(chain.finals))


def _verdict(tripped: tuple[int, Decision] | None, formed_us: I8) -> Verdict | None:
    if tripped is None:
        return None
    at_us, decision = tripped[0] - START_US, tripped[1]
    assert decision.directive is not None
    assert decision.directive.cause is not None
    return Verdict(
        at_us / SECOND_US,
        decision,
        decision.directive.cause,
        int(np.searchsorted(formed_us, at_us, "right")),
        (at_us - int(formed_us[99])) / SECOND_US,
    )


def _baseline(finals: list[FinalBuckets]) -> tuple[dict[int, int], int]:
    bins: dict[int, int] = {}
    errors = 0
    for final in finals:
        for second in final.seconds if final.topic == Topic.REQUESTS.value else ():
            for content in second.contents:
                if content.population is None or content.population.arm != "baseline":
                    continue
                for cell in content.cells:
                    if cell.dimension == "all":
                        errors += cell.counters.get("errors", 0) + cell.counters.get("no_token", 0)
                        held = cell.measures["ttft_us"]
                        for at, count in zip(held.bins, held.counts, strict=True):
                            bins[at] = bins.get(at, 0) + count
    return bins, errors
