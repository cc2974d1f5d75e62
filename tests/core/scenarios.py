"""Logs with everything that happens to a log, made from a seed; a source that is fed, killed and restarted.

Events are plain JSON objects: the oracle reads them as they are, the core reads them as JSON or as columns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from pipeline.core.source import BucketRecord, ContentSettings, Flush, HoleError, RecordMeta
from schemas import codec
from schemas.buckets import FinalBuckets, FreshCells
from schemas.columns import BatchHeader
from schemas.events import ARMS
from schemas.pairs import PairBatch
from schemas.records import read_msgpack
from schemas.topics import COLUMNS, JSON, TICK, Topic, gating_partition
from tests import oracle

START_US = 1_700_000_000_000_000
MS = 1_000
SECOND = 1_000_000

Read = TypeVar("Read", FinalBuckets, FreshCells)

ANSWERS: tuple[tuple[list[int], list[list[int]], list[list[float]]], ...] = (
    ([5, 9], [[5, 6, 7], [9, 8, 7]], [[-0.1053, -2.9957, -3.9120], [-0.2231, -2.3026, -3.5066]]),
    ([5, 9], [[5, 6, 7], [9, 8, 7]], [[-0.1201, -2.8134, -3.7015], [-0.2485, -2.2073, -3.6119]]),
    ([5, 8], [[6, 5, 7], [8, 9, 4]], [[-0.9163, -1.2040, -2.3026], [-0.5108, -1.3863, -3.0002]]),
    ([6], [[6, 11, 12, 13]], [[-0.0513, -4.1997, -4.8283, -5.2983]]),
    (
        [5, 9, 3],
        [[7, 5, 6], [9, 2, 1], [3]],
        [[-2.4079, -0.2877, -3.1011], [-9999.0, -0.4005, -1.6094], [-0.0101]],
    ),
    ([5], [[5, 6]], [[-0.3567, float("-1e30")]]),
)
"""(tokens, top ids, log-probabilities); few enough that every combination is scored over and over."""
UNREADABLE = ([77, 5], [[5, 5], [5, 6]], [[-0.5, -1.5], [-0.5, -1.5]])


@dataclass(frozen=True)
class Shape:
    """What a log is like. Rates are per event or per record, in 0..1."""

    seconds: int = 60
    prompts_per_s: float = 2.0
    loss: float = 0.1
    duplicate: float = 0.08
    resend: float = 0.05
    late: float = 0.08
    early: float = 0.05
    anonymous: float = 0.15
    gap: float = 0.01
    step_back: float = 0.03
    columnar: float = 0.5
    nodes: int = 3
    prompts: int = 12
    """Distinct signatures of anonymous halves."""
    largest_batch: int = 6


def _labels(rng: random.Random, shape: Shape, number: int, start_us: int, anonymous: bool) -> dict[str, Any]:
    """Labels of one prompt, alike on all arms."""
    labels: dict[str, Any] = {
        "v": 1,
        "rollout": rng.choice(("chat", "chat", "code", "r/3")),
        "signature": f"{rng.randrange(shape.prompts) if anonymous else number:032x}",
        "ts_us": start_us,
        "input_tokens": rng.choice((10, 512, 513, 3000, 5000, 9000)),
    }
    generation = rng.choice((None, 1, 1, 2))
    if generation is not None:
        labels["generation"] = generation
    if not anonymous:
        labels["pair_id"] = f"request {number}" if number % 2 else f"{number + 2**100:032x}"
    for name, values in (
        ("request_type", (None, "chat", "completion")),
        ("hardware", (None, "H100")),
        ("region", (None, "eu")),
        ("temperature", (None, 0, 0.7)),
        ("prompt_version", (None, "p1")),
    ):
        value = rng.choice(values)
        if value is not None:
            labels[name] = value
    return labels


def _of_arm(rng: random.Random, shape: Shape, labels: dict[str, Any], arm: str) -> dict[str, Any]:
    event = {
        **labels,
        "arm": arm,
        "node": f"{arm}-{rng.randrange(shape.nodes)}",
        "duration_us": rng.randrange(3_000_000),
        "model_version": "m1" if arm == "baseline" else rng.choice(("m2", "m2", "m3")),
    }
    if rng.random() < 0.05:
        event["prompt_version"] = "p2"
    if rng.random() < 0.05:
        event.pop("generation", None)
    if rng.random() < shape.early:
        event["duration_us"] += rng.randrange(4, 12) * SECOND
    return event


def logit_event(
    rng: random.Random, shape: Shape, labels: dict[str, Any], arm: str, arms: list[str]
) -> dict[str, Any]:
    """A logit event with one of the canned answers."""
    tokens, ids, values = rng.choice(ANSWERS) if rng.random() < 0.97 else UNREADABLE
    event = {
        **_of_arm(rng, shape, labels, arm),
        "expected_arms": arms,
        "definition": "raw" if rng.random() < 0.97 else "processed",
        "source": rng.choice(("generated", "forced")),
        "tokens": tokens,
        "top_ids": ids,
        "top_logprobs": values,
    }
    if rng.random() < 0.06:
        event["kind"] = "logits"
    if rng.random() < 0.3:
        event["precision"] = rng.choice((4, 6, "f16"))
    return event


def request_event(
    rng: random.Random, shape: Shape, labels: dict[str, Any], arm: str, arms: list[str]
) -> dict[str, Any]:
    """A request event."""
    event = {
        **_of_arm(rng, shape, labels, arm),
        "shadow": arm != arms[0],
        "status": rng.choice((200, 200, 200, 429, 500)),
        "output_tokens": rng.randrange(50),
    }
    if rng.random() < 0.9:
        event["ttft_us"] = rng.choice((0, 1, 499_999, 500_000, 500_001, rng.randrange(2_000_000)))
        event["itl_us"] = rng.randrange(60_000)
    if rng.random() < 0.1:
        event["error"] = "timeout"
    if rng.random() < 0.5:
        event["cached_tokens"] = rng.randrange(event["input_tokens"] + 1)
    return event


Maker = Callable[[random.Random, Shape, dict[str, Any], str, list[str]], dict[str, Any]]


def make_log(
    seed: int, topic: Topic, shape: Shape, settings: ContentSettings, partitions: int = 1
) -> list[list[dict[str, Any]]]:
    """One list of records per partition; each record an oracle's record with `value` and `content_type`."""
    rng = random.Random(seed)
    sent = _telemetry(rng, shape) if topic is Topic.TELEMETRY else _traffic(rng, topic, shape, settings)
    parts: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in range(partitions)]
    for at_us, event in sorted(sent, key=lambda s: s[0]):
        key = event["node"] if topic is Topic.TELEMETRY else event["signature"]
        parts[int.from_bytes(str(key).encode()[-4:], "big") % partitions].append((at_us, event))
    return [_records(rng, topic, shape, part) for part in parts]


def _traffic(
    rng: random.Random, topic: Topic, shape: Shape, settings: ContentSettings
) -> list[tuple[int, dict[str, Any]]]:
    maker: Maker = logit_event if topic is Topic.LOGITS else request_event
    sent: list[tuple[int, dict[str, Any]]] = []
    for number in range(int(shape.seconds * shape.prompts_per_s)):
        start_us = START_US + rng.randrange(shape.seconds * SECOND)
        arms = rng.choice(
            (["baseline", "canary"], ["baseline", "canary", "control"], ["baseline", "control"])
        )
        labels = _labels(rng, shape, number, start_us, rng.random() < shape.anonymous)
        for arm in arms:
            if rng.random() < shape.loss:
                continue
            event = maker(rng, shape, labels, arm, arms)
            at_us = start_us + min(event["duration_us"], 3_000_000) + rng.randrange(200_000)
            if rng.random() < shape.late:
                at_us += rng.choice((1, 2, 3)) * rng.choice((settings.lateness_us, settings.join_timeout_us))
            sent.append((at_us, event))
            while rng.random() < shape.duplicate:
                at_us += rng.randrange(2 * settings.join_timeout_us)
                sent.append((at_us, event))
            if "pair_id" not in event and rng.random() < 0.1:
                again = {**event, "ts_us": event["ts_us"] + 7, "node": "elsewhere"}
                sent.append((at_us + rng.randrange(settings.join_timeout_us), again))
    return sent


def _telemetry(rng: random.Random, shape: Shape) -> list[tuple[int, dict[str, Any]]]:
    sent: list[tuple[int, dict[str, Any]]] = []
    for _ in range(int(shape.seconds * shape.prompts_per_s)):
        at_us = START_US + rng.randrange(shape.seconds * SECOND)
        event: dict[str, Any] = {"v": 1, "node": f"n{rng.randrange(shape.nodes)}", "ts_us": at_us}
        if rng.random() < 0.8:
            used = rng.randrange(80 << 30)
            event["gpus"] = [{"index": i, "memory_used_bytes": used + i} for i in range(rng.randrange(1, 3))]
        if rng.random() < 0.8:
            event["engine"] = {"kv_usage": rng.random(), "running": rng.randrange(9), "preemptions": 2}
        if rng.random() < 0.5:
            event["fragmentation"] = {"method": rng.choice(("exact", "n/a")), "internal": rng.random()}
        if rng.random() < shape.early:
            event["ts_us"] += 9 * SECOND
        late_us = rng.randrange(6 * SECOND) if rng.random() < shape.late else 0
        sent.append((at_us + late_us, event))
        if rng.random() < shape.duplicate:
            sent.append((at_us + late_us + rng.randrange(3 * SECOND), event))
    return sent


def _records(
    rng: random.Random, topic: Topic, shape: Shape, sent: list[tuple[int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Cut into records, with append times, ticks, gaps, steps of the broker's clock and re-sent batches."""
    todo = list(sent)
    records: list[dict[str, Any]] = []
    resends: list[tuple[int, dict[str, Any]]] = []
    shift_us = 0
    append_us = START_US
    sequence = 0
    while todo or resends:
        if resends and (not todo or resends[0][0] <= todo[0][0]):
            at_us, again = resends.pop(0)
            append_us = (at_us + shift_us) // MS * MS
            records.append({**again, "offset": len(records), "append_us": append_us})
            continue
        at_us = todo[0][0]
        while records and at_us + shift_us > append_us + 1_100_000 and rng.random() < 0.8:
            append_us += SECOND
            records.append(_record(len(records), append_us, TICK, b"", None, None))
        batch = [todo.pop(0)]
        size = rng.randrange(1, shape.largest_batch + 1)
        while todo and len(batch) < size and todo[0][0] - at_us < 300_000:
            batch.append(todo.pop(0))
        append_us = (batch[-1][0] + shift_us) // MS * MS
        events = [event for _, event in batch]
        made = _encoded(rng, topic, shape, events, sequence, len(records), append_us)
        sequence += 1
        records.append(made)
        if rng.random() < shape.resend:
            resends.append((batch[-1][0] + rng.randrange(8 * SECOND), made))
            resends.sort(key=lambda pair: pair[0])
        if rng.random() < shape.gap:
            shift_us += rng.randrange(40) * SECOND
        if rng.random() < shape.step_back:
            shift_us -= rng.randrange(4 * SECOND)
    for _ in range(rng.randrange(25)):
        append_us += SECOND
        records.append(_record(len(records), append_us, TICK, b"", None, None))
    return records


def _record(
    offset: int, append_us: int, content_type: str, value: bytes, events: Any, producer: Any
) -> dict[str, Any]:
    return {
        "offset": offset,
        "append_us": append_us,
        "size_bytes": len(value),
        "events": events,
        "producer": producer,
        "content_type": content_type,
        "value": value,
    }


def _encoded(
    rng: random.Random,
    topic: Topic,
    shape: Shape,
    events: list[dict[str, Any]],
    sequence: int,
    offset: int,
    append_us: int,
) -> dict[str, Any]:
    value = msgspec.json.encode(events if len(events) > 1 or rng.random() < 0.5 else events[0])
    if rng.random() >= shape.columnar:
        return _record(offset, append_us, JSON, value, events, None)
    dropped = {"chat/canary": rng.randrange(1, 4)} if rng.random() < 0.1 else {}
    decode, encode = CODECS[topic]
    columns = decode(value, JSON).columns
    assert columns.n == len(events)
    header = BatchHeader("producer", sequence, dropped)
    producer = {"producer_id": "producer", "sequence": sequence, "dropped": dropped}
    return _record(offset, append_us, COLUMNS, encode(columns, header), events, producer)


CODECS: dict[Topic, tuple[Callable[..., Any], Callable[..., bytes]]] = {
    Topic.REQUESTS: (codec.decode_requests, codec.encode_requests),
    Topic.LOGITS: (codec.decode_logits, codec.encode_logits),
    Topic.TELEMETRY: (codec.decode_telemetry, codec.encode_telemetry),
}


class Source(Protocol):
    """What MeasureSource and PairSource have in common."""

    next_offset: int | None

    def read(self, meta: RecordMeta, decoded: Any) -> None: ...
    def take_flush(self) -> Flush: ...
    def gauges(self) -> dict[str, int]: ...


@dataclass
class Published:
    """Everything that was acknowledged, over all lives of a source."""

    finals: list[FinalBuckets] = field(default_factory=list)
    fresh: list[FreshCells] = field(default_factory=list)
    pairs: list[PairBatch] = field(default_factory=list)
    committed: int = 0


def feed(source: Source, topic: Topic, record: dict[str, Any]) -> None:
    """Read one record as the shell does; a hole is read twice."""
    meta = RecordMeta(record["offset"], record["append_us"], record["size_bytes"])
    decoded = None if record["events"] is None else CODECS[topic][0](record["value"], record["content_type"])
    try:
        source.read(meta, decoded)
    except HoleError:
        source.read(meta, decoded)


def live(
    make: Callable[[], Source],
    topic: Topic,
    records: Sequence[dict[str, Any]],
    seed: int,
    restarts: int,
    flush_rate: float = 0.3,
) -> Published:
    """Feed a whole log through a source that is killed `restarts` times and starts anew from its commit."""
    rng = random.Random(seed)
    published = Published()
    deaths = sorted(rng.randrange(len(records)) for _ in range(restarts)) if records else []
    for death in [*deaths, len(records)]:
        source = make()
        acknowledged: int | None = None
        for record in records[published.committed : death]:
            feed(source, topic, record)
            if rng.random() < flush_rate:
                acknowledged = _publish(source, published, acknowledged)
                if acknowledged is not None and rng.random() < 0.7:
                    published.committed = max(published.committed, acknowledged)
    _publish(source, published, None)
    return published


def _publish(source: Source, published: Published, before: int | None) -> int | None:
    flush = source.take_flush()
    published.finals += finals_of(flush)
    published.fresh += fresh_of(flush)
    # These travel as bytes, too, so that nothing handed out is changed afterwards.
    published.pairs += (read_msgpack(msgspec.msgpack.encode(each), PairBatch) for each in flush.pairs)
    return flush.commit if flush.commit is not None else before


def finals_of(flush: Flush) -> list[FinalBuckets]:
    """The closed seconds of a flush, as their reader has them."""
    return [_read(each, FinalBuckets) for each in flush.finals]


def fresh_of(flush: Flush) -> list[FreshCells]:
    """The changed cells of a flush, as their reader has them."""
    return [_read(each, FreshCells) for each in flush.fresh]


def _read(record: BucketRecord, kind: type[Read]) -> Read:
    found = read_msgpack(record.value, kind)
    assert msgspec.msgpack.encode(found) == record.value
    assert found.gating_partition == record.gating_partition
    return found


Contents = dict[int, dict[Any, dict[tuple[str, str], dict[str, Any]]]]


def plain(cell: Any) -> dict[str, Any]:
    """A cell in the oracle's form."""
    measures = {
        name: {
            "count": m.count,
            "sum": m.sum,
            "min": m.min,
            "max": m.max,
            "bins": dict(zip(m.bins, m.counts, strict=True)),
        }
        for name, m in cell.measures.items()
    }
    return {"counters": dict(cell.counters), "measures": measures, "worst": [tuple(w) for w in cell.worst]}


def population_key(population: Any) -> Any:
    """A population in the oracle's form."""
    if population is None:
        return None
    p = population
    return (p.rollout, p.generation, p.arm, p.model_version, p.differs)


def statements(finals: Iterable[FinalBuckets]) -> list[tuple[FinalBuckets, Contents]]:
    """Finals with their parts put together, in the order in which they were said."""
    found: list[tuple[FinalBuckets, Contents]] = []
    open_parts: dict[int, tuple[int, Contents]] = {}
    for final in finals:
        assert final.closed_from <= final.closed_through
        assert final.whole_from <= final.closed_from
        expected, contents = open_parts.pop(final.gating_partition, (0, {}))
        assert final.part == expected
        for second in final.seconds:
            assert final.closed_from <= second.second <= final.closed_through
            held = contents.setdefault(second.second, {})
            for cells in second.contents:
                if cells.population is not None:
                    assert gating_partition(cells.population.rollout) == final.gating_partition
                population = held.setdefault(population_key(cells.population), {})
                for cell in cells.cells:
                    assert (cell.dimension, cell.value) not in population
                    population[cell.dimension, cell.value] = plain(cell)
        if final.part + 1 < final.parts:
            open_parts[final.gating_partition] = (final.part + 1, contents)
        else:
            found.append((final, contents))
    assert not open_parts
    return found


def assemble(finals: Iterable[FinalBuckets], gating_partitions: int = 4) -> tuple[Contents, set[int]]:
    """What all finals say together; raises AssertionError where two of them disagree.

    Returns contents, and the starts and ends of what is closed as a set of seconds (those from the first
    event on; a range that begins at 0 is cut there).
    """
    contents: list[Contents] = [{} for _ in range(gating_partitions)]
    closed: list[set[int]] = [set() for _ in range(gating_partitions)]
    floor = START_US // SECOND - 100
    for final, said in statements(finals):
        gating = final.gating_partition
        for second in range(max(final.closed_from, floor), final.closed_through + 1):
            if second in closed[gating]:
                assert contents[gating].get(second) == said.get(second), f"two finals for {second}"
            closed[gating].add(second)
            if second in said:
                contents[gating][second] = said[second]
    assert all(each == closed[0] for each in closed)
    merged: Contents = {}
    for each in contents:
        for second, held in each.items():
            for population, cells in held.items():
                known = merged.setdefault(second, {}).setdefault(population, cells)
                assert known == cells
    return merged, closed[0]


def oracle_settings(settings: ContentSettings, waiting_bytes: int = 256 << 20) -> oracle.Settings:
    """The same settings for the oracle."""
    return oracle.Settings(
        settings.lateness_us, settings.join_timeout_us, settings.cells_per_bucket, waiting_bytes
    )


assert ARMS == ("baseline", "canary", "control")
