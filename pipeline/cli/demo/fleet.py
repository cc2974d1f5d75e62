"""A small fleet that answers with recorded answers: arrivals in, request and logit events out. Pure.

Every request is mirrored: baseline and canary always answer, control one time in two. The recorded top-k
lists are passed on unchanged, whatever the arrival's prompt length; only the side of 2,048 tokens decides
which recorded prompts stand for it. Times are as recorded.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any, Final

from pipeline.cli.demo.recording import About, Answer, Recording, VariantName
from pipeline.cli.demo.traffic import Arrival
from schemas.control import ArmSpec, RolloutSpec
from schemas.events import Arm, LogitEvent, RequestEvent
from schemas.signature import prompt_signature

ROLLOUT: Final = "demo"
BASELINE_VERSION: Final = "smol-1"
CANARY_VERSION: Final = "smol-2"
VERSIONS: Final[dict[Arm, str]] = {
    "baseline": BASELINE_VERSION,
    "canary": CANARY_VERSION,
    "control": BASELINE_VERSION,
}
NODES: Final[dict[Arm, tuple[str, ...]]] = {
    "baseline": ("base-1", "base-2", "base-3", "base-4"),
    "canary": ("canary-1", "canary-2", "canary-3"),
    "control": ("control-1", "control-2"),
}
FAULTY_NODE: Final = "canary-3"
CONTROL_SHARE: Final = 0.5
HEALTHY: Final[dict[Arm, VariantName]] = {"baseline": "baseline", "canary": "healthy", "control": "control"}


def rollout_spec(policy: str) -> RolloutSpec:
    """The roll-out of the demo, with its own policy."""
    return RolloutSpec(
        rollout=ROLLOUT,
        arms={
            arm: ArmSpec(model_version=VERSIONS[arm], nodes=(names[0].rstrip("0123456789") + "*",))
            for arm, names in NODES.items()
        },
        fallback=BASELINE_VERSION,
        policy=policy,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What one arm did with one request; both events are to be published at `complete_us`."""

    request: RequestEvent
    logit: LogitEvent
    complete_us: int
    affected: bool
    """Whether the fault worked on this answer."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What the gateway knows of the roll-out when a request arrives."""

    generation: int | None
    canary_percent: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One request on its way to its arms."""

    arrival: Arrival
    ts_us: int
    generation: int | None
    prompt_id: str
    pair_id: str
    arms: tuple[Arm, ...]
    primary: Arm
    """The arm whose answer the user gets; the others are shadows."""


class Fleet:
    """Turns arrivals into events. The same seed, arrivals and routing give the same events."""

    def __init__(self, recording: Recording, seed: int) -> None:
        self._recording = recording
        self._draw = random.Random(f"fleet/{seed}")  # noqa: S311 (a repeatable demo, no secret)
        self._events = EventMaker(recording.about, seed)

    def serve(self, arrival: Arrival, ts_us: int, routing: Routing, *, fault: bool) -> list[Served]:
        """All arms' answers to one arrival at the gateway at `ts_us`.

        `fault`: whether FAULTY_NODE carries the fault now; it damages prompts over the boundary only."""
        draw = self._draw
        long = arrival.input_tokens > self._recording.about.boundary_tokens
        prompt = draw.choice(self._recording.prompts["long" if long else "short"])
        arms: list[Arm] = ["baseline", "canary"]
        if draw.random() < CONTROL_SHARE:
            arms.append("control")
        pair_id = f"{draw.getrandbits(128):032x}"
        primary: Arm = "canary" if draw.random() * 100 < routing.canary_percent else "baseline"
        turn = Turn(arrival, ts_us, routing.generation, prompt.prompt_id, pair_id, tuple(arms), primary)
        served = []
        for arm in arms:
            node = draw.choice(NODES[arm])
            affected = fault and long and node == FAULTY_NODE
            answer = prompt.answers["fault" if affected else HEALTHY[arm]]
            served.append(self._events.make(turn, arm, node, answer, affected=affected))
        return served


class EventMaker:
    """Answers into events, with the labels of the demo's roll-out."""

    def __init__(self, about: About, seed: int) -> None:
        self._about = about
        self._key = hashlib.sha256(f"demo/{seed}".encode()).digest()

    def _signature(self, turn: Turn) -> str:
        """A prompt is known here by its id and the length it has, or stands in for."""
        text = f"{turn.prompt_id} of {turn.arrival.input_tokens} tokens"
        return prompt_signature(self._key, turn.arrival.request_type, ["user", text], {"temperature": 0.0})

    def make(self, turn: Turn, arm: Arm, node: str, answer: Answer, *, affected: bool) -> Served:
        """Both events of one arm's answer; its token lists are passed on unchanged."""
        about = self._about
        labels: dict[str, Any] = {
            "v": 1,
            "rollout": ROLLOUT,
            "generation": turn.generation,
            "arm": arm,
            "pair_id": turn.pair_id,
            "signature": self._signature(turn),
            "ts_us": turn.ts_us,
            "duration_us": answer.duration_us,
            "node": node,
            "input_tokens": turn.arrival.input_tokens,
            # As many tokens had to be computed as in the recording, which is what its times hold for.
            "cached_tokens": max(0, turn.arrival.input_tokens - (answer.input_tokens - answer.cached_tokens)),
            "model_name": about.model,
            "model_version": VERSIONS[arm],
            "request_type": turn.arrival.request_type,
            "temperature": 0.0,
            "engine": about.engine,
            "hardware": "cpu",
        }
        count = len(answer.tokens)
        request = RequestEvent(
            **labels,
            shadow=arm != turn.primary,
            status=200,
            ttft_us=answer.ttft_us,
            output_tokens=count,
            itl_us=(answer.duration_us - answer.ttft_us) // (count - 1) if count > 1 else None,
            finish_reason="stop" if answer.ended else "length",
            stream=True,
            prompt_id=turn.prompt_id,
        )
        logit = LogitEvent(
            **labels,
            expected_arms=turn.arms,
            definition=about.definition,
            source="generated",
            precision=about.precision,
            tokens=answer.tokens,
            top_ids=answer.top_ids,
            top_logprobs=answer.top_logprobs,
            ended=answer.ended,
        )
        return Served(request, logit, turn.ts_us + answer.duration_us, affected)
