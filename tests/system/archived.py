"""What the archive holds against what was sent and published: everything exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from schemas.topics import Topic
from tests.system.findings import Finding, more_or_less, shortened
from tests.system.judge import Log, decode_pairs, pair_rows
from tests.system.workload import PARTITIONS, Batch

ARCHIVED: Final = {
    Topic.REQUESTS: "inference_log",
    Topic.LOGITS: "logit_summaries",
    Topic.TELEMETRY: "node_telemetry",
}
PLACES: Final = "SELECT part, off, pos, count() FROM {} GROUP BY part, off, pos"
SUMS: Final = (
    "SELECT rollout, ifNull(generation, -1), arm, count(), sum(duration_us), sum(input_tokens) FROM {} "
    "GROUP BY 1, 2, 3"
)
DECIDED: Final = "SELECT part, off, count() FROM decisions GROUP BY part, off"
SCORED: Final = "SELECT count() FROM v_pair_scores"
QUERIES: Final = (
    *(PLACES.format(table) for table in ARCHIVED.values()),
    *(SUMS.format(table) for table in ("inference_log", "logit_summaries")),
    DECIDED,
    SCORED,
)


def through_views(sql: str) -> str:
    """The query as analysts ask it: what a process that was no longer the owner stored again is merged."""
    return sql.replace(" FROM ", " FROM v_").replace(" v_v_", " v_")


def differences(log: Log, rows: Mapping[str, list[list[Any]]]) -> list[Finding]:
    """ClickHouse holds every event, pair and decision exactly once. `rows`: the answers to QUERIES."""
    found: list[Finding] = []
    for topic, table in ARCHIVED.items():
        expected = {
            (partition, offset, position): 1
            for (name, partition, offset), batch in log.sent.items()
            if name == topic
            for position in batch.positions
        }
        said = {(int(p), int(o), int(at)): int(n) for p, o, at, n in rows[PLACES.format(table)]}
        found += _counted(table, said, expected)
        if topic is not Topic.TELEMETRY:
            found += _counted(
                f"sums of {table}",
                {tuple(row[:3]): tuple(map(int, row[3:])) for row in rows[SUMS.format(table)]},
                _sums(batch for (name, _, _), batch in log.sent.items() if name == topic),
            )
    decided = {
        (place[1], record.offset): 1
        for place, records in log.records.items()
        if place[0] == Topic.DECISIONS
        for record in records
    }
    found += _counted("decisions", {(int(p), int(o)): int(n) for p, o, n in rows[DECIDED]}, decided)
    scored = len(
        {
            (partition, *key)
            for partition in range(PARTITIONS)
            for record in log.records[Topic.PAIRS.value, partition]
            for key, _ in pair_rows(decode_pairs(record.value))
        }
    )
    if (there := int(rows[SCORED][0][0])) != scored:
        found.append(more_or_less(there, scored, f"v_pair_scores: {there} pairs, expected {scored}"))
    return shortened(found)


def _sums(batches: Iterable[Batch]) -> dict[Any, Any]:
    sums: dict[Any, list[int]] = {}
    for batch in batches:
        for event in batch.events:
            key = (event["rollout"], event.get("generation", -1), event["arm"])
            total = sums.setdefault(key, [0, 0, 0])
            total[0] += 1
            total[1] += event["duration_us"]
            total[2] += event["input_tokens"]
    return {key: tuple(total) for key, total in sums.items()}


def _counted(what: str, said: Mapping[Any, Any], expected: Mapping[Any, Any]) -> list[Finding]:
    return [
        more_or_less(
            _times(said.get(key, 0)),
            _times(expected.get(key, 0)),
            f"{what} {key}: archived {said.get(key, 0)}, expected {expected.get(key, 0)}",
        )
        for key in sorted(said.keys() | expected.keys(), key=str)
        if said.get(key, 0) != expected.get(key, 0)
    ]


def _times(value: Any) -> int:
    """A count, or the first of some sums."""
    return int(value[0] if isinstance(value, tuple) else value)
