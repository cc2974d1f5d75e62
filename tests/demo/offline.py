"""The demo without broker, processes and clock: its events through the core alone, in virtual time."""

from __future__ import annotations

import heapq
from itertools import islice

import msgspec
import numpy as np

from pipeline.cli.demo.fleet import CANARY_VERSION, ROLLOUT, Fleet, Routing, Served, rollout_spec
from pipeline.cli.demo.recording import Recording
from pipeline.cli.demo.traffic import drawn_arrivals, read_figures
from pipeline.core.gate.gating import Effect, GateCore, GateSettings
from pipeline.core.measuring import MeasureSource
from pipeline.core.pairing import PairSource
from pipeline.core.source import ContentSettings, RecordMeta
from pipeline.policy_file import parse_policy
from schemas.buckets import FinalBuckets, FreshCells
from schemas.codec import Decoded, logit_columns, request_columns
from schemas.control import Command, Decision, Directive
from schemas.records import read_msgpack
from schemas.topics import Topic, gating_partition

START_US = 1_700_000_000_000_000
STEP_US = 250_000
CONTENT = ContentSettings(lateness_us=1_000_000, join_timeout_us=3_000_000)


class Offline:
    """One partition per source, records every 250 ms of virtual time, a gate that judges after each."""

    def __init__(self, policy: str) -> None:
        self.partition = gating_partition(ROLLOUT)
        self.now_us = START_US
        self.requests = MeasureSource(Topic.REQUESTS, 0, CONTENT)
        self.telemetry = MeasureSource(Topic.TELEMETRY, 0, CONTENT)
        self.logits = PairSource(Topic.LOGITS, 0, CONTENT)
        self.offsets = {"requests": 0, "telemetry": 0, "logits": 0}
        self.decisions: list[Decision] = []
        self.directive: Directive | None = None
        self.gate = GateCore(
            self.partition,
            {Topic.REQUESTS.value: 1, Topic.LOGITS.value: 1, Topic.TELEMETRY.value: 1},
            GateSettings(
                lease_us=15_000_000,
                renew_us=5_000_000,
                dead_man_us=60_000_000,
                blind_after_us=45_000_000,
                join_timeout_us=CONTENT.join_timeout_us,
                lateness_us=CONTENT.lateness_us,
                settings_hash=CONTENT.hash,
                parse_policy=parse_policy,
                default_policy=policy,
            ),
        )
        start = Command(
            v=1,
            command_id="start",
            rollout=ROLLOUT,
            ts_us=self.now_us,
            command="start",
            arguments={"spec": msgspec.to_builtins(rollout_spec(policy))},
            by="test",
        )
        self._obey(self.gate.on_command(start, 0, self.now_us))

    def routing(self) -> Routing:
        """What the gateway knows."""
        if self.directive is None:
            return Routing(None, 0.0)
        return Routing(self.directive.generation, self.directive.weights[CANARY_VERSION])

    def append(self, served: list[Served]) -> None:
        """One record per topic at this moment; empty ones are ticks."""
        requests = logits = None
        if served:
            positions = np.arange(len(served), dtype=np.int64)
            requests = Decoded(request_columns([one.request for one in served]), positions, (), None)
            logits = Decoded(logit_columns([one.logit for one in served]), positions, (), None)
        self.requests.read(self._meta("requests"), requests)
        self.telemetry.read(self._meta("telemetry"), None)
        self.logits.read(self._meta("logits"), logits)
        for source in (self.requests, self.telemetry, self.logits):
            flush = source.take_flush()
            for final in flush.finals:
                if final.gating_partition == self.partition:
                    self.gate.on_final(read_msgpack(final.value, FinalBuckets))
            for fresh in flush.fresh:
                if fresh.gating_partition == self.partition:
                    self.gate.on_fresh(read_msgpack(fresh.value, FreshCells))
        self._obey(self.gate.judge_fresh(self.now_us))
        self._obey(self.gate.judge_complete(self.now_us))

    def _meta(self, source: str) -> RecordMeta:
        offset = self.offsets[source]
        self.offsets[source] = offset + 1
        return RecordMeta(offset, self.now_us, 1_000)

    def _obey(self, effects: list[Effect]) -> None:
        for effect in effects:
            if effect.decision is not None:
                self.decisions.append(effect.decision)
            self.directive = effect.directive or self.directive


def drill(
    recording: Recording, policy: str, seed: int, *, requests: int, speed: float, fault_from: int | None
) -> Offline:
    """The demo's traffic of one seed, played to its end and five seconds on."""
    run = Offline(policy)
    fleet = Fleet(recording, seed)
    arrivals = islice(drawn_arrivals(read_figures(), seed), requests)
    due: list[tuple[int, int, Served]] = []
    pending = next(arrivals, None)
    index = 0
    quiet_us = 0
    while quiet_us < 5_000_000:
        run.now_us += STEP_US
        while pending is not None and START_US + pending.at_us / speed <= run.now_us:
            fault = fault_from is not None and index >= fault_from
            for served in fleet.serve(pending, run.now_us, run.routing(), fault=fault):
                heapq.heappush(due, (served.complete_us, len(due) + index * 1_000, served))
            index += 1
            pending = next(arrivals, None)
        out = []
        while due and due[0][0] <= run.now_us:
            out.append(heapq.heappop(due)[2])
        run.append(out)
        quiet_us = 0 if pending is not None or due else quiet_us + STEP_US
    return run
