"""The real sources and real gates in event time: events in, decisions out, no broker and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from pipeline.core.gate.gating import Effect, GateCore
from pipeline.core.measuring import MeasureSource
from pipeline.core.pairing import PairSource
from pipeline.core.source import ContentSettings, Flush, RecordMeta
from schemas.buckets import FinalBuckets, FreshCells
from schemas.codec import Decoded, logit_columns, request_columns
from schemas.control import Command, Decision, RolloutSpec
from schemas.events import LogitEvent, RequestEvent
from schemas.records import read_msgpack
from schemas.topics import Topic
from tests.core.gate.build import settings

CONTENT: Final = ContentSettings(gating_partitions=1)
SECOND_US: Final = 1_000_000


SOURCES: Final = dict.fromkeys((Topic.REQUESTS.value, Topic.LOGITS.value, Topic.TELEMETRY.value), 1)


class Chain:
    """One partition per source; whatever a flush says reaches every gate at once, which judges at once."""

    def __init__(self, spec: RolloutSpec, policies: Mapping[str, str], start_us: int) -> None:
        """A gate for each policy text, by name."""
        self.now_us = start_us
        self.requests = MeasureSource(Topic.REQUESTS, 0, CONTENT)
        self.telemetry = MeasureSource(Topic.TELEMETRY, 0, CONTENT)
        self.logits = PairSource(Topic.LOGITS, 0, CONTENT)
        self.finals: list[FinalBuckets] = []
        self.decisions: dict[str, list[tuple[int, Decision]]] = {name: [] for name in policies}
        """Of each gate, with the time at which it was taken."""
        self._offset = 0
        self.gates = {name: _gate(policy) for name, policy in policies.items()}
        start = Command(
            v=1,
            command_id="start",
            rollout=spec.rollout,
            ts_us=start_us,
            command="start",
            arguments={"spec": msgspec.to_builtins(spec)},
            by="simulation",
        )
        for name, gate in self.gates.items():
            self._note(name, gate.on_command(start, 0, start_us))

    def append(
        self, now_us: int, requests: Sequence[RequestEvent] = (), logits: Sequence[LogitEvent] = ()
    ) -> list[Flush]:
        """One record per topic, appended and flushed at this moment; without events a tick."""
        self.now_us = now_us
        meta = RecordMeta(self._offset, now_us, 1_000)
        self._offset += 1
        self.requests.read(meta, _decoded(request_columns, requests))
        self.telemetry.read(meta, None)
        self.logits.read(meta, _decoded(logit_columns, logits))
        flushes = [source.take_flush() for source in (self.requests, self.telemetry, self.logits)]
        finals = [read_msgpack(said.value, FinalBuckets) for flush in flushes for said in flush.finals]
        fresh = [read_msgpack(said.value, FreshCells) for flush in flushes for said in flush.fresh]
        self.finals += finals
        for name, gate in self.gates.items():
            for final in finals:
                gate.on_final(final)
            for cells in fresh:
                gate.on_fresh(cells)
            self._note(name, gate.judge_fresh(now_us))
            self._note(name, gate.judge_complete(now_us))
        return flushes

    def close(self) -> list[Flush]:
        """Ticks until every second so far is closed and judged."""
        end_us = self.now_us + CONTENT.lateness_us + 2 * SECOND_US
        flushes: list[Flush] = []
        while self.now_us < end_us:
            flushes += self.append(self.now_us + SECOND_US)
        return flushes

    def tripped(self, name: str) -> tuple[int, Decision] | None:
        """When and how this gate ended the generation; None if it did not."""
        found = [(at_us, one) for at_us, one in self.decisions[name] if one.kind == "trip"]
        return found[0] if found else None

    def _note(self, name: str, effects: Sequence[Effect]) -> None:
        self.decisions[name] += [
            (self.now_us, each.decision) for each in effects if each.decision is not None
        ]


def _gate(policy: str) -> GateCore:
    return GateCore(
        0,
        SOURCES,
        settings(
            settings_hash=CONTENT.hash,
            join_timeout_us=CONTENT.join_timeout_us,
            lateness_us=CONTENT.lateness_us,
            default_policy=policy,
        ),
    )


def _decoded(columns: object, events: Sequence[object]) -> object:
    if not events:
        return None
    return Decoded(columns(list(events)), np.arange(len(events), dtype=np.int64), (), None)  # type: ignore[operator]
