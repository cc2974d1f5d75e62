"""Recorded answers as events: runs of positions of the shared folder's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from schemas.columns import F8, I8
from schemas.control import ArmSpec, RolloutSpec
from schemas.events import Arm, LogitEvent, RequestEvent
from tests.simulation.scores import POSITIONS, K, recorded_scores
from tests.simulation.traffic import REQUEST_TYPES, Draw

ROLLOUT: Final = "chat"
SECOND_US: Final = 1_000_000
START_US: Final = 1_790_000_000 * SECOND_US
VERSIONS: Final = {"baseline": "v1", "canary": "v2"}


@dataclass(frozen=True, slots=True)
class Answers:
    """Recorded runs of one variant: greedy answers, `runs[i]` where run i begins."""

    tokens: list[int]
    ids: list[tuple[int, ...]]
    logprobs: list[tuple[float, ...]]
    canary_ids: list[tuple[int, ...]]
    canary_logprobs: list[tuple[float, ...]]
    runs: I8
    scores: F8


def recorded_answers(shared: Path, variant: str) -> Answers:
    """The greedy answers of a variant, and every run of POSITIONS positions of one of them."""
    folder = shared / "data" / "logits"
    base, canary = np.load(folder / "base.greedy.npz"), np.load(folder / f"tf.greedy.{variant}.npz")
    offsets = base["offset"].tolist()
    runs = [at for first, last in pairwise(offsets) for at in range(first, last - POSITIONS + 1)]

    def rows(array: Any) -> list[Any]:
        return [tuple(row) for row in array[:, :K].tolist()]

    return Answers(
        base["tok"].tolist(),
        rows(base["top_ids"]),
        rows(base["top_lp"].astype(np.float64)),
        rows(canary["top_ids"]),
        rows(canary["top_lp"].astype(np.float64)),
        np.array(runs, dtype=np.int64),
        recorded_scores(shared, variant)[: len(runs)],
    )


def drawn(draw: Draw, answers: Answers, n: int, mean: float) -> I8:
    """n runs, drawn with exponential weights so that their mean score is this one, in nats."""
    scores = answers.scores
    low, high = -1e4, 1e4
    while high - low > 1e-6:
        tilt = (low + high) / 2
        exponent = tilt * scores
        weights = np.exp(exponent - exponent.max())
        weights /= weights.sum()
        low, high = (low, tilt) if weights @ scores > mean else (tilt, high)
    return draw.choice(answers.runs, n, p=weights)


def spec(policy: str | None = None, *, control: bool = False) -> RolloutSpec:
    """The roll-out of the simulation."""
    arms: dict[Arm, ArmSpec] = {
        "baseline": ArmSpec(model_version="v1", nodes=("b-*",)),
        "canary": ArmSpec(model_version="v2", nodes=("c-*",)),
    }
    if control:
        arms["control"] = ArmSpec(model_version="v1", nodes=("k-*",))
    return RolloutSpec(
        rollout=ROLLOUT,
        arms=arms,
        fallback="v1",
        policy=policy,
    )


def request(
    arm: str,
    *,
    at_us: int,
    ttft_us: int,
    node: int,
    tokens: int,
    request_type: int,
    shadow: bool,
    number: int,
) -> RequestEvent:
    """A request that came at `at_us` and ended with its first token."""
    return RequestEvent(
        **_labels(arm, at_us, ttft_us, node, tokens, request_type, number),
        shadow=shadow,
        status=200,
        ttft_us=ttft_us,
        output_tokens=POSITIONS,
    )


def halves(
    answers: Answers,
    run: int,
    *,
    at_us: int,
    node: int,
    tokens: int,
    request_type: int,
    number: int,
    duration_us: int = 0,
) -> Sequence[LogitEvent]:
    """Both halves of one mirrored request, the canary's teacher-forced."""
    places = range(run, run + POSITIONS)
    emitted = tuple(answers.tokens[at] for at in places)
    return [
        LogitEvent(
            **_labels(arm, at_us, duration_us, node, tokens, request_type, number),
            expected_arms=("baseline", "canary"),
            definition="raw",
            source=source,  # type: ignore[arg-type]
            precision="f32",
            tokens=emitted,
            top_ids=tuple(ids[at] for at in places),
            top_logprobs=tuple(logprobs[at] for at in places),
        )
        for arm, source, ids, logprobs in (
            ("baseline", "generated", answers.ids, answers.logprobs),
            ("canary", "forced", answers.canary_ids, answers.canary_logprobs),
        )
    ]


def _labels(
    arm: str, at_us: int, duration_us: int, node: int, tokens: int, request_type: int, number: int
) -> dict[str, Any]:
    ident = f"{number:032x}"
    return {
        "v": 1,
        "rollout": ROLLOUT,
        "generation": 1,
        "arm": arm,
        "pair_id": ident,
        "signature": ident,
        "ts_us": START_US + at_us,
        "duration_us": duration_us,
        "node": f"{arm[0]}-{node:02d}",
        "input_tokens": tokens,
        "model_version": VERSIONS[arm],
        "request_type": REQUEST_TYPES[request_type],
    }
