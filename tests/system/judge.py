"""The judge: what the workers wrote against what the oracle computes from the same topics.

Every function returns findings, one line each; an empty list is a pass. It reads records as they lie in
the topics, the JSON that was sent, and rows of the archive; the pipeline takes no part in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from schemas.buckets import FinalBuckets
from schemas.pairs import PairBatch
from schemas.topics import CONTENT_TYPE, TICK, Topic, gating_partition
from tests import oracle
from tests.oracle.log import closed_through
from tests.oracle.pairs import logit_content
from tests.system.decisions import Evidence, differences
from tests.system.findings import Finding, Kind, shortened
from tests.system.workload import PARTITIONS, Batch, Traffic

Place = tuple[str, int]
Contents = dict[int, dict[Any, dict[tuple[str, str], dict[str, Any]]]]
_FINALS: Final = msgspec.msgpack.Decoder(FinalBuckets)
_PAIRS: Final = msgspec.msgpack.Decoder(PairBatch)


def decode_final(value: bytes) -> FinalBuckets:
    """A record of `klaxon.buckets`."""
    return _FINALS.decode(value)


def decode_pairs(value: bytes) -> PairBatch:
    """A record of `klaxon.pairs`."""
    return _PAIRS.decode(value)


class Log:
    """Everything in the topics, and what was sent."""

    def __init__(
        self,
        records: Mapping[Place, Sequence[Any]],
        sent: Mapping[tuple[str, int, int], Batch],
        settings: oracle.Settings,
    ) -> None:
        # Finals first: what is copied later reaches at least as far.
        self.finals = [list(found) for (topic, _), found in sorted(records.items()) if topic == Topic.BUCKETS]
        self.records = {place: list(found) for place, found in records.items()}
        self.sent = sent
        self.settings = settings
        self._inputs: dict[Place, list[dict[str, Any]]] = {}
        self._content: dict[Place, Contents] = {}
        self._pairs: dict[int, list[dict[str, Any]]] = {}
        self._evidence: Evidence | None = None

    def later(self, records: Mapping[Place, Sequence[Any]]) -> Log:
        """The same inputs and content, with what the workers have written since."""
        later = Log(records, self.sent, self.settings)
        sources = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY)
        later.records |= {place: found for place, found in self.records.items() if place[0] in sources}
        later._inputs, later._content, later._pairs = self._inputs, self._content, self._pairs
        later._evidence = self._evidence
        return later

    def inputs(self, topic: Topic, partition: int) -> list[dict[str, Any]]:
        """A source partition as the oracle reads it: ticks, and what was sent, at the broker's times."""
        place = (topic.value, partition)
        if place not in self._inputs:
            self._inputs[place] = [self._input(record) for record in self.records[place]]
        return self._inputs[place]

    def _input(self, record: Any) -> dict[str, Any]:
        is_tick = dict(record.headers).get(CONTENT_TYPE) == TICK.encode()
        batch = None if is_tick else self.sent.get((record.topic, record.partition, record.offset))
        assert is_tick or batch is not None, f"{record.topic}/{record.partition} {record.offset}: not sent"
        return {
            "offset": record.offset,
            "append_us": record.timestamp * 1000,
            "size_bytes": len(record.value or b""),
            "events": None if batch is None else list(batch.events),
            "producer": None if batch is None else batch.producer,
        }

    def content(self, topic: Topic, partition: int) -> Contents:
        """Closed seconds of a source partition, by the oracle."""
        place = (topic.value, partition)
        if place not in self._content:
            inputs = self.inputs(topic, partition)
            if topic is Topic.REQUESTS:
                self._content[place] = oracle.request_seconds(inputs, self.settings)
            elif topic is Topic.TELEMETRY:
                self._content[place] = oracle.telemetry_seconds(inputs, self.settings)
            else:
                self._content[place], self._pairs[partition] = logit_content(inputs, self.settings)
        return self._content[place]

    def pairs(self, partition: int) -> list[dict[str, Any]]:
        """Scored pairs of a logits partition, by the oracle."""
        self.content(Topic.LOGITS, partition)
        return self._pairs[partition]

    def position(self, partition: int, first: tuple[int, int]) -> tuple[int, int]:
        """(offset, position in its record) of a logit event given by its index among the valid ones."""
        offset, index = first
        return offset, self.sent[Topic.LOGITS.value, partition, offset].positions[index]

    def evidence(self) -> Evidence:
        """What decisions rest on."""
        if self._evidence is None:
            self._evidence = self._gathered()
        return self._evidence

    def _gathered(self) -> Evidence:
        numbers = range(PARTITIONS)
        sources = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY)
        return Evidence(
            logits=tuple(self.content(Topic.LOGITS, number) for number in numbers),
            requests=tuple(self.content(Topic.REQUESTS, number) for number in numbers),
            complete_through=min(
                closed_through(self.inputs(topic, number), self.settings)
                for topic in sources
                for number in numbers
            ),
        )


def finals(log: Log, topic: Topic, through: int) -> list[Finding]:
    """Final buckets of all partitions of a source topic; every second up to `through` must be there."""
    found: list[Finding] = []
    for gating, records in enumerate(log.finals):
        said = _statements(decode_final(record.value) for record in records)
        for partition in range(PARTITIONS):
            where = f"{topic.value}/{partition} for gating partition {gating}"
            statements = said.get((topic.value, partition), [])
            found += _uninterrupted(where, [(s["from"], s["through"]) for s in statements], through)
            found += _content_differences(
                where, statements, _share(log.content(topic, partition), gating), log.settings, through
            )
    return shortened(found)


def _statements(records: Iterable[FinalBuckets]) -> dict[Place, list[dict[str, Any]]]:
    """Statements with their parts put together, by source, as they came. Parts of two writers may mix."""
    found: dict[Place, list[dict[str, Any]]] = {}
    opened: dict[Any, dict[str, Any]] = {}
    for record in records:
        place = (record.topic, record.partition)
        key = (place, record.offset, record.closed_from, record.closed_through, record.parts)
        said = (
            opened.setdefault(key, {"part": 0, "seconds": {}}) if record.part else {"part": 0, "seconds": {}}
        )
        opened[key] = said
        if said["part"] != record.part:
            continue
        said["part"] += 1
        for second in record.seconds:
            held = said["seconds"].setdefault(second.second, {})
            for group in second.contents:
                p = group.population
                name = p and (p.rollout, p.generation, p.arm, p.model_version, p.differs)
                cells = held.setdefault(name, {})
                for cell in group.cells:
                    cells[cell.dimension, cell.value] = _plain(cell)
        if record.part + 1 == record.parts:
            found.setdefault(place, []).append(
                {
                    "from": max(record.closed_from, record.whole_from),
                    "through": record.closed_through,
                    "seconds": said["seconds"],
                }
            )
            del opened[key]
    return found


def _plain(cell: Any) -> dict[str, Any]:
    return {
        "counters": dict(cell.counters),
        "measures": {
            name: {
                "count": m.count,
                "sum": m.sum,
                "min": m.min,
                "max": m.max,
                "bins": dict(zip(m.bins, m.counts, strict=True)),
            }
            for name, m in cell.measures.items()
        },
        "worst": [tuple(each) for each in cell.worst],
    }


def _uninterrupted(where: str, ranges: list[tuple[int, int]], through: int) -> list[Finding]:
    """Every second from the first to `through` must be stated."""
    next_second = 0
    gaps: list[Finding] = []
    for first, last in sorted(ranges):
        if first > next_second:
            text = f"{where}: seconds {next_second} to {first - 1} were never published"
            gaps.append(Finding("lost", text))
        next_second = max(next_second, last + 1)
    if next_second <= through:
        text = f"{where}: closed through {next_second - 1}, expected {through}"
        gaps.append(Finding("lost", text))
    return gaps


def _share(contents: Contents, gating: int) -> Contents:
    """What of a source's content goes to a gating partition."""
    share: Contents = {}
    for second, held in contents.items():
        mine = {
            name: cells for name, cells in held.items() if name is None or gating_partition(name[0]) == gating
        }
        if mine:
            share[second] = mine
    return share


def _content_differences(
    where: str, statements: list[dict[str, Any]], expected: Contents, settings: oracle.Settings, through: int
) -> list[Finding]:
    found: list[Finding] = []
    stated: set[int] = set()
    for statement in statements:
        seconds = statement["seconds"]
        for second in seconds:
            if not statement["from"] <= second <= statement["through"]:
                found.append(Finding("wrong", f"{where}: second {second} lies outside its own statement"))
        within = {second for second in expected if statement["from"] <= second <= statement["through"]} | set(
            seconds
        )
        stated |= within
        for second in sorted(within):
            if seconds.get(second, {}) != expected.get(second, {}):
                found.append(_difference(where, seconds.get(second, {}), expected.get(second, {}), second))
    found += [
        Finding("lost", f"{where}: second {second} was never published")
        for second in sorted(set(expected) - stated)
        if second <= through
    ]
    return found


def _difference(where: str, said: Any, expected: Any, second: int) -> Finding:
    """How two seconds differ, shown by the first cell: lost as soon as something is counted too low."""
    kinds: set[str] = set()
    first = "populations without cells differ"
    for name in sorted(said.keys() | expected.keys(), key=str, reverse=True):
        ours, theirs = said.get(name, {}), expected.get(name, {})
        for cell in sorted(ours.keys() | theirs.keys(), reverse=True):
            a, b = ours.get(cell), theirs.get(cell)
            if a != b:
                first = f"{name} {cell}: published {a}, expected {b}"
                counts, wanted = _counts(a), _counts(b)
                kinds |= {
                    "lost" if counts[key] < wanted[key] else "doubled"
                    for key in counts.keys() | wanted.keys()
                    if counts[key] != wanted[key]
                }
    kind: Kind = "lost" if "lost" in kinds else "doubled" if "doubled" in kinds else "wrong"
    return Finding(kind, f"{where} second {second}: {first}")


def _counts(cell: Any) -> Counter[Any]:
    if cell is None:
        return Counter()
    measured = {("measure", name): measure["count"] for name, measure in cell["measures"].items()}
    return Counter({**cell["counters"], **measured})


def pairs(log: Log, through_us: int) -> list[Finding]:
    """`klaxon.pairs`: every pair scored up to this log time, each with the oracle's scores."""
    found: list[Finding] = []
    for partition in range(PARTITIONS):
        expected = {
            (*log.position(partition, pair["first"]), pair["arm"]): (
                pair["name"],
                pair["formed_us"],
                pair["event_us"],
                pair["late"],
                pair["result"]["positions"],
                *(pair["result"][name] for name in SCORES),
            )
            for pair in log.pairs(partition)
        }
        said: dict[Any, Any] = {}
        for record in log.records[Topic.PAIRS.value, partition]:
            for key, row in pair_rows(decode_pairs(record.value)):
                if said.setdefault(key, row) != row:
                    found.append(
                        Finding("wrong", f"klaxon.pairs/{partition}: {key} was said twice, differently")
                    )
        found += [
            Finding(
                "wrong" if key in expected else "doubled",
                f"klaxon.pairs/{partition} {key}: published {row}, expected {expected.get(key)}",
            )
            for key, row in said.items()
            if expected.get(key) != row
        ]
        found += [
            Finding("lost", f"klaxon.pairs/{partition} {key}: missing")
            for key, row in expected.items()
            if key not in said and row[1] <= through_us
        ]
    return shortened(found)


SCORES: Final = ("kl_lower", "kl_lower_max", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree")


def pair_rows(batch: PairBatch) -> Iterable[tuple[Any, Any]]:
    """(key within its partition, what is said of it) of every pair of a record."""
    for at in range(len(batch.arm)):
        key = (
            batch.first_offset[at],
            batch.first_position[at],
            ("baseline", "canary", "control")[batch.arm[at]],
        )
        yield (
            key,
            (
                batch.pair_id[at] or batch.signature[at],
                batch.formed_us[at],
                batch.event_us[at],
                batch.late[at],
                batch.positions[at],
                *(getattr(batch, name)[at] for name in SCORES),
            ),
        )


def dead_letters(log: Log, *, once: bool) -> list[Finding]:
    """Every refusal with field, reason and position. `once`: nobody restarted, so nothing twice."""
    expected = {
        (topic, partition, offset, refusal.position): refusal
        for (topic, partition, offset), batch in log.sent.items()
        for refusal in batch.refusals
    }
    found: list[Finding] = []
    said: Counter[Any] = Counter()
    for (topic, _), records in log.records.items():
        if topic != Topic.DEAD_LETTER:
            continue
        for record in records:
            letter = json.loads(record.value)
            key = (letter["topic"], letter["partition"], letter["offset"], letter["position"])
            said[key] += 1
            refusal = expected.get(key)
            if refusal is None:
                found.append(Finding("wrong", f"dead letter that nothing caused: {letter}"))
            elif letter["field"] != refusal.field or refusal.reason_contains not in letter["reason"]:
                found.append(Finding("wrong", f"dead letter {letter}, expected {refusal}"))
    found += [
        Finding("lost", f"no dead letter of {key}: {refusal}")
        for key, refusal in expected.items()
        if key not in said
    ]
    if once:
        found += [
            Finding("doubled", f"{count} dead letters of {key}", count - 1)
            for key, count in said.items()
            if count > 1
        ]
    return shortened(found)


def one_writer(log: Log) -> list[Finding]:
    """Per roll-out, (generation, epoch) of what was committed: unique, rising, and one trip a generation."""
    found: list[Finding] = []
    for topic in (Topic.CONTROL, Topic.DECISIONS):
        last: dict[str, tuple[int, int]] = {}
        for (name, _), records in sorted(log.records.items()):
            if name != topic:
                continue
            for record in records:
                said = json.loads(record.value)
                if topic is Topic.DECISIONS:
                    if said["kind"] == "refused":
                        continue
                    said = said["directive"]
                at = (said["generation"], said["epoch"])
                before = last.get(said["rollout"], (0, -1))
                if at[0] < before[0] or at[1] <= before[1]:
                    found.append(
                        Finding("doubled", f"{topic.value}: {said['rollout']} at {at} after {before}")
                    )
                last[said["rollout"]] = at
    trips = Counter(
        (decision["directive"]["rollout"], decision["directive"]["generation"])
        for (name, _), records in log.records.items()
        if name == Topic.DECISIONS
        for record in records
        if (decision := json.loads(record.value))["kind"] == "trip"
    )
    found += [
        Finding("doubled", f"{count} trips of {key}", count - 1) for key, count in trips.items() if count > 1
    ]
    return found


def decided(log: Log, traffic: Traffic) -> list[Finding]:
    """A roll-out's decisions: kinds, seconds and window values, and one trip per generation that is bad."""
    place = (Topic.DECISIONS.value, gating_partition(traffic.rollout))
    said = [
        json.loads(record.value) for record in log.records[place] if record.key == traffic.rollout.encode()
    ]
    return differences(log.evidence(), traffic, said)
