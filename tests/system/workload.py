"""Traffic of one roll-out, made from a seed: what a fleet sends, with everything that goes wrong on the way.

Events are plain JSON objects. Each record remembers the objects it was made of, whatever its encoding, so
that the oracle needs no decoder, and what readers must refuse in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from schemas import codec
from schemas.columns import BatchHeader
from schemas.examples import invalid_examples
from schemas.topics import COLUMNS, JSON, Topic, partition_of
from tests.system.malformed import EMBEDDABLE, Event, Refusal, neighbours_of

Fault = Literal[
    "none", "everywhere", "long_prompts_of_one_node", "slow", "lossy", "too_few", "observed", "twice"
]
FAULTS: Final[tuple[Fault, ...]] = (
    "none", "everywhere", "long_prompts_of_one_node", "slow", "lossy", "too_few", "observed", "twice",
)  # fmt: skip
SECOND: Final = 1_000_000
PARTITIONS: Final = 2
ARMS: Final = ("baseline", "canary", "control")

Answer = tuple[list[int], list[list[int]], list[list[float]]]
BASELINE: Final[tuple[Answer, ...]] = (
    ([5, 9], [[5, 6, 7], [9, 8, 7]], [[-0.1053, -2.9957, -3.9120], [-0.2231, -2.3026, -3.5066]]),
    (
        [6, 3],
        [[6, 11, 12, 13], [3, 4, 5]],
        [[-0.0513, -4.1997, -4.8283, -5.2983], [-0.6931, -1.204, -2.3026]],
    ),
)
HEALTHY: Final[tuple[Answer, ...]] = (
    ([5, 9], [[5, 6, 7], [9, 8, 7]], [[-0.1201, -2.8134, -3.7015], [-0.2485, -2.2073, -3.6119]]),
    (
        [6, 3],
        [[6, 11, 12, 13], [3, 4, 5]],
        [[-0.0613, -4.1097, -4.7283, -5.1983], [-0.7931, -1.104, -2.2026]],
    ),
)
"""About 0.002 nats from the baseline's answer of the same index."""
DAMAGED: Final[tuple[Answer, ...]] = (
    ([5, 8], [[6, 5, 7], [8, 9, 4]], [[-0.9163, -1.2040, -2.3026], [-0.5108, -1.3863, -3.0002]]),
    (
        [12, 3],
        [[12, 6, 11, 20], [4, 3, 5]],
        [[-0.3613, -2.1997, -3.8283, -4.2983], [-0.1931, -2.204, -3.3026]],
    ),
)
"""About one nat from it."""

DIVERGENCE_LIMIT: Final = 0.05
SLOW_US: Final = 500_000
SLOW_SHARE: Final = 0.2
WINDOW_S: Final = 4
MIN_SAMPLES: Final = 10
COVERAGE_LIMIT: Final = 0.5
MIN_PAIRS: Final = 10
SCOPES: Final = ("rollout", "node", "context", "node_context")
STEPS: Final = (10, 50, 100)


@dataclass(frozen=True)
class Batch:
    """One record. `at_us`: when it is sent, on the clock of its events."""

    at_us: int
    topic: Topic
    partition: int
    value: bytes
    content_type: str | None
    events: tuple[Event, ...]
    """The valid ones, in order, as JSON."""
    positions: tuple[int, ...]
    """Where they stand in the record."""
    producer: dict[str, Any] | None = None
    refusals: tuple[Refusal, ...] = ()
    transaction: Literal["committed", "aborted"] | None = None


@dataclass(frozen=True)
class Traffic:
    """What a seed's roll-out is like. Rates per event or per record, in 0..1."""

    seed: int
    fault: Fault
    seconds: float = 9.0
    prompts_per_s: float = 9.0
    loss: float = 0.05
    duplicate: float = 0.06
    late: float = 0.04
    early: float = 0.04
    anonymous: float = 0.08
    columnar: float = 0.5
    malformed: float = 0.08
    transactional: float = 0.03

    @property
    def rollout(self) -> str:
        """Its name: one roll-out per seed."""
        return f"seed-{self.seed}-{self.fault}"


def policy(fault: Fault) -> str:
    """The policy text of a roll-out; `tests/system/decisions.py` judges by the same numbers."""
    mode = "observe" if fault == "observed" else "enforce"
    return f"""\
version: 1
rules:
  - id: divergence
    metric: kl_lower
    statistic: mean
    window: {WINDOW_S}s
    limit: {DIVERGENCE_LIMIT}
    min_samples: {MIN_SAMPLES}
    scope: [{", ".join(SCOPES)}]
    action: rollback_l1
    mode: {mode}
  - id: slow-share
    metric: ttft_over_share
    over: {SLOW_US}us
    window: {WINDOW_S}s
    limit: {SLOW_SHARE}
    min_samples: {MIN_SAMPLES}
    scope: rollout
    action: rollback_l1
    mode: enforce
coverage: {{limit: {COVERAGE_LIMIT}, window: {WINDOW_S}s, min_samples: {MIN_SAMPLES}, action: hold}}
progression: {{mode: auto, min_pairs: {MIN_PAIRS}}}
"""


def spec(traffic: Traffic) -> dict[str, Any]:
    """The roll-out's specification, as its start command carries it."""
    arms = {arm: {"model_version": "m1" if arm != "canary" else "m2", "nodes": [f"{arm}-*"]} for arm in ARMS}
    return {
        "v": 1,
        "rollout": traffic.rollout,
        "arms": arms,
        "fallback": "m1",
        "steps": list(STEPS),
        "policy": policy(traffic.fault),
    }


def command(
    rollout: str, name: str, ts_us: int, arguments: dict[str, Any] | None = None
) -> tuple[bytes, bytes]:
    """(key, value) of an operator's command."""
    said = {
        "v": 1,
        "command_id": f"{rollout}/{name}",
        "rollout": rollout,
        "ts_us": ts_us,
        "command": name,
        "arguments": arguments or {},
        "by": "test",
    }
    return rollout.encode(), json.dumps(said).encode()


def make_traffic(traffic: Traffic, start_us: int, generation: int = 1) -> list[Batch]:
    """All records of one generation, in the order in which they are sent; the same for the same arguments."""
    rng = random.Random(f"{traffic.seed}/{traffic.fault}/{generation}")
    sent: list[tuple[int, Topic, Event]] = []
    count = 8 if traffic.fault == "too_few" else round(traffic.seconds * traffic.prompts_per_s)
    for number in range(count):
        at_us = start_us + rng.randrange(round(traffic.seconds * SECOND))
        sent += _prompt(rng, traffic, generation, number, at_us, start_us)
    sent += _telemetry(rng, traffic, start_us)
    batches: list[Batch] = []
    for topic in (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY):
        for partition in range(PARTITIONS):
            mine = [
                (at_us, event)
                for at_us, of, event in sorted(sent, key=lambda each: each[0])
                if of is topic and partition_of(_key(topic, event), PARTITIONS) == partition
            ]
            batches += _cut(rng, traffic, topic, partition, mine)
        batches += _examples(rng, traffic, topic, start_us)
    return sorted(batches, key=lambda batch: batch.at_us)


def _key(topic: Topic, event: Event) -> bytes:
    return str(event["node"] if topic is Topic.TELEMETRY else event["signature"]).encode()


def _prompt(
    rng: random.Random, traffic: Traffic, generation: int, number: int, at_us: int, start_us: int
) -> list[tuple[int, Topic, Event]]:
    """One prompt's request and logit events on its arms, with their send times."""
    early_phase = at_us - start_us < traffic.seconds * SECOND * 0.45
    anonymous = rng.random() < traffic.anonymous
    arms = rng.choice((("baseline", "canary"), ARMS, ARMS))
    identity = (traffic.seed << 64) + (generation << 48)
    labels: Event = {
        "v": 1,
        "rollout": traffic.rollout,
        "signature": f"{identity + (number % 5 if anonymous else number + 100):032x}",
        "ts_us": at_us - rng.choice((0, 0, rng.randrange(SECOND))),
        "input_tokens": rng.choice((10, 512, 513, 2048, 3000, 9000)),
        "request_type": rng.choice(("chat", "completion")),
        "temperature": rng.choice((0, 0.7)),
    }
    if rng.random() < 0.8:
        labels["generation"] = generation
    if not anonymous:
        labels["pair_id"] = (
            f"{traffic.seed}/{generation}/{number}" if number % 2 else f"{identity + number:032x}"
        )
    if rng.random() < 0.5:
        labels["region"] = rng.choice(("eu", "us"))
    which = rng.randrange(len(BASELINE))
    sent: list[tuple[int, Topic, Event]] = []
    for arm in arms:
        for topic in (Topic.REQUESTS, Topic.LOGITS):
            loss = traffic.loss
            if traffic.fault == "lossy" and topic is Topic.LOGITS and arm == "canary":
                loss = 0.8
            if rng.random() < loss:
                continue
            event = _of_arm(rng, traffic, labels, arm, early_phase)
            event |= (
                _request(rng, traffic, arm, arms)
                if topic is Topic.REQUESTS
                else _logits(rng, traffic, event, which, list(arms))
            )
            send_us = at_us + min(event["duration_us"], 400_000) + rng.randrange(150_000)
            if early_phase and rng.random() < traffic.late:
                send_us += rng.choice((1_300_000, 2_200_000, 3_400_000, 4_500_000))
            sent.append((send_us, topic, event))
            if early_phase and rng.random() < traffic.duplicate:
                sent.append((send_us + rng.randrange(4 * SECOND), topic, event))
    return sent


def _of_arm(rng: random.Random, traffic: Traffic, labels: Event, arm: str, early_phase: bool) -> Event:
    event = {
        **labels,
        "arm": arm,
        "node": f"{arm}-{rng.randrange(2)}",
        "duration_us": 50_000 + rng.randrange(350_000),
        "model_version": "m2" if arm == "canary" else "m1",
    }
    if rng.random() < 0.02:
        event["model_version"] = "m9"
    if rng.random() < 0.02:
        event["prompt_version"] = "p2"
    if early_phase and rng.random() < traffic.early:
        event["duration_us"] += rng.randrange(2, 9) * SECOND
    return event


def _request(rng: random.Random, traffic: Traffic, arm: str, arms: tuple[str, ...]) -> Event:
    slow = traffic.fault == "slow" and arm == "canary"
    event: Event = {
        "shadow": arm != arms[0],
        "status": rng.choice((200, 200, 200, 429, 500)),
        "output_tokens": rng.randrange(50),
    }
    if rng.random() < 0.95:
        ttft_us = rng.choice((0, 1, SLOW_US - 1, SLOW_US, rng.randrange(SLOW_US)))
        event["ttft_us"] = ttft_us + SLOW_US + 1 if slow else ttft_us
        event["itl_us"] = rng.randrange(60_000)
    if rng.random() < 0.05:
        event["error"] = "timeout"
    if rng.random() < 0.5:
        event["cached_tokens"] = rng.randrange(10)
    return event


def _logits(rng: random.Random, traffic: Traffic, labels: Event, which: int, arms: list[str]) -> Event:
    damaged = labels["arm"] == "canary" and (
        traffic.fault in ("everywhere", "too_few", "observed", "twice")
        or (
            traffic.fault == "long_prompts_of_one_node"
            and labels["node"] == "canary-1"
            and labels["input_tokens"] > 2048
        )
    )
    answers = BASELINE if labels["arm"] == "baseline" else DAMAGED if damaged else HEALTHY
    tokens, ids, values = answers[which]
    event: Event = {
        "expected_arms": arms,
        "definition": "raw" if rng.random() < 0.98 else "processed",
        # Who scores the baseline's tokens has the baseline's tokens.
        "source": rng.choice(("generated", "forced" if tokens == BASELINE[which][0] else "generated")),
        "tokens": tokens,
        "top_ids": ids,
        "top_logprobs": values,
    }
    if rng.random() < 0.02:
        event["kind"] = "logits"
    if rng.random() < 0.2:
        event["precision"] = rng.choice((4, 6))
    return event


def _telemetry(rng: random.Random, traffic: Traffic, start_us: int) -> list[tuple[int, Topic, Event]]:
    """One event per node and 0.7 s; nodes are this seed's own, so that duplicates are only its own."""
    sent = []
    for node in range(3):
        at_us = start_us + rng.randrange(SECOND)
        while at_us < start_us + traffic.seconds * SECOND:
            event: Event = {"v": 1, "node": f"{traffic.rollout}-{node}", "ts_us": at_us}
            if rng.random() < 0.8:
                event["gpus"] = [{"index": 0, "memory_used_bytes": rng.randrange(80 << 30)}]
            if rng.random() < 0.8:
                event["engine"] = {"kv_usage": rng.random(), "running": rng.randrange(9)}
            sent.append((at_us + rng.randrange(100_000), Topic.TELEMETRY, event))
            if rng.random() < traffic.duplicate:
                sent.append((at_us + rng.randrange(2 * SECOND), Topic.TELEMETRY, event))
            at_us += 700_000
    return sent


def _cut(
    rng: random.Random, traffic: Traffic, topic: Topic, partition: int, sent: list[tuple[int, Event]]
) -> Iterable[Batch]:
    """Cut into records; some are sent again whole, some carry malformed events, some are transactions."""
    todo = list(sent)
    sequence = 0
    while todo:
        first_us = todo[0][0]
        size = rng.randrange(1, 7)
        batch = [todo.pop(0)]
        while todo and len(batch) < size and todo[0][0] - first_us < 150_000:
            batch.append(todo.pop(0))
        events = [event for _, event in batch]
        made = _record(rng, traffic, topic, partition, batch[-1][0], events, sequence)
        sequence += 1
        if rng.random() < traffic.transactional and not made.refusals:
            made = replace(made, transaction=rng.choice(("committed", "aborted")))
        yield made
        if made.transaction == "aborted":
            # The producer tries again, as it would.
            yield replace(made, at_us=made.at_us + 50_000, transaction="committed")
        elif rng.random() < traffic.duplicate and len(todo) > 10:
            yield replace(made, at_us=made.at_us + rng.randrange(3 * SECOND), transaction=None)


Codec = tuple[Callable[..., Any], Callable[..., bytes]]
CODECS: Final[dict[Topic, Codec]] = {
    Topic.REQUESTS: (codec.decode_requests, codec.encode_requests),
    Topic.LOGITS: (codec.decode_logits, codec.encode_logits),
    Topic.TELEMETRY: (codec.decode_telemetry, codec.encode_telemetry),
}


def _record(
    rng: random.Random,
    traffic: Traffic,
    topic: Topic,
    partition: int,
    at_us: int,
    events: list[Event],
    sequence: int,
) -> Batch:
    positions = tuple(range(len(events)))
    if rng.random() < traffic.columnar:
        decode, encode = CODECS[topic]
        columns = decode(json.dumps(events).encode(), JSON).columns
        assert columns.n == len(events)
        dropped = {}
        if topic is not Topic.TELEMETRY and rng.random() < 0.08:
            dropped = {f"{traffic.rollout}/{rng.choice(ARMS)}": rng.randrange(1, 3)}
        producer = {
            "producer_id": f"{traffic.rollout}/{topic}/{partition}/{at_us}",
            "sequence": sequence,
            "dropped": dropped,
        }
        value = encode(columns, BatchHeader(producer["producer_id"], sequence, dropped))
        return Batch(at_us, topic, partition, value, COLUMNS, tuple(events), positions, producer)
    refusals: tuple[Refusal, ...] = ()
    said: list[Any] = list(events)
    if rng.random() < traffic.malformed:
        example = rng.choice(EMBEDDABLE[topic])
        at = rng.randrange(len(events) + 1)
        said.insert(at, json.loads(example.value))
        positions = tuple(number for number in range(len(said)) if number != at)
        refusals = (Refusal(at, example.field, example.reason_contains),)
    value = json.dumps(said[0] if len(said) == 1 and rng.random() < 0.5 else said).encode()
    content_type = JSON if rng.random() < 0.8 else None
    return Batch(at_us, topic, partition, value, content_type, tuple(events), positions, None, refusals)


def _examples(rng: random.Random, traffic: Traffic, topic: Topic, start_us: int) -> Iterable[Batch]:
    """Some must-fail examples, as they are: whole records, broken encodings, bad ones among neighbours."""
    known = [example for example in invalid_examples(topic) if neighbours_of(example) is not None]
    for example in rng.sample(known, min(3, len(known))):
        neighbours = neighbours_of(example)
        assert neighbours is not None
        at_us = start_us + rng.randrange(round(traffic.seconds * SECOND * 0.7))
        yield Batch(
            at_us,
            topic,
            rng.randrange(PARTITIONS),
            example.value,
            example.content_type,
            tuple(event for _, event in neighbours),
            tuple(position for position, _ in neighbours),
            None,
            (Refusal(example.position, example.field, example.reason_contains),),
        )
