"""Builders for the gate's tests: buckets as workers would publish them, and a gate that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pipeline.core.bins import KIND_OF_MEASURE, bin_of
from pipeline.core.gate.gating import Effect, GateCore, GateSettings
from pipeline.core.gate.state import decode_state, encode_state
from pipeline.policy_file import parse_policy, shipped_policy_text
from schemas.buckets import (
    SCORE_ONE,
    Cell,
    Distribution,
    FinalBuckets,
    FreshCells,
    Population,
    PopulationCells,
    Second,
)
from schemas.control import Command, Decision, Directive, Rollout
from schemas.topics import Topic

NAME = "chat"
HASH = "settings"
T0 = 1_700_000_000
"""A second of event time to start from."""
LATENESS_S = 15
JOIN_S = 60
SOURCES = {Topic.REQUESTS.value: 1, Topic.LOGITS.value: 1, Topic.TELEMETRY.value: 1}
SPEC: dict[str, object] = {
    "rollout": NAME,
    "arms": {
        "baseline": {"model_version": "v1", "nodes": ["b-*"]},
        "canary": {"model_version": "v2", "nodes": ["c-*"]},
        "control": {"model_version": "v1", "nodes": ["k-*"]},
    },
    "fallback": "v1",
}
REQUESTS, LOGITS, TELEMETRY = Topic.REQUESTS.value, Topic.LOGITS.value, Topic.TELEMETRY.value


def shipped_without(*rules: str) -> str:
    """The shipped policy without these rules, whose comments go with them."""
    head, *entries = shipped_policy_text().split("\n  - id: ")
    found = "\n  - id: ".join([head, *(one for one in entries if one.split("\n", 1)[0] not in rules)])
    assert {rule.id for rule in parse_policy(shipped_policy_text()).rules} - set(rules) == {
        rule.id for rule in parse_policy(found).rules
    }
    return found


def settings(**changes: object) -> GateSettings:
    values: dict[str, object] = {
        "lease_us": 15_000_000,
        "renew_us": 5_000_000,
        "dead_man_us": 60_000_000,
        "blind_after_us": 45_000_000,
        "join_timeout_us": JOIN_S * 1_000_000,
        "lateness_us": LATENESS_S * 1_000_000,
        "settings_hash": HASH,
        "parse_policy": parse_policy,
        "default_policy": shipped_policy_text(),
    }
    return GateSettings(**{**values, **changes})  # type: ignore[arg-type]


def distribution(measure: str, values: Sequence[int]) -> Distribution:
    kind = KIND_OF_MEASURE[measure]
    bins, counts = np.unique(bin_of(kind, np.array(values, dtype=np.int64)), return_counts=True)
    return Distribution(
        len(values), sum(values), min(values), max(values), [int(b) for b in bins], [int(c) for c in counts]
    )


def nats(score: float) -> int:
    return round(score * SCORE_ONE)


def canary(
    arm: str = "canary", version: str | None = "v2", generation: int | None = 1, differs: int = 1
) -> Population:
    return Population(NAME, generation, arm, version, differs)  # type: ignore[arg-type]


def pair_cell(
    scores: Sequence[float],
    dimension: str = "all",
    value: str = "",
    worst: Sequence[tuple[int, bytes]] = (),
    **counters: int,
) -> Cell:
    counted = {name.replace("__", "."): count for name, count in counters.items()}
    if scores:
        counted["pairs"] = len(scores)
    units = [nats(score) for score in scores]
    measures = {"kl_lower": distribution("kl_lower", units)} if scores else {}
    return Cell(dimension, value, counted, measures, list(worst))


def request_cell(ttfts_us: Sequence[int], dimension: str = "all", value: str = "") -> Cell:
    return Cell(
        dimension,
        value,
        {"requests": len(ttfts_us)},
        {"ttft_us": distribution("ttft_us", ttfts_us)} if ttfts_us else {},
        [],
    )


def final(
    topic: str,
    closed_from: int,
    closed_through: int,
    contents: dict[int, list[PopulationCells]] | None = None,
    *,
    partition: int = 0,
    whole_from: int = 0,
    offset: int | None = None,
    settings_hash: str = HASH,
) -> FinalBuckets:
    return FinalBuckets(
        1, topic, partition, 0, closed_from, closed_through, whole_from,
        closed_through - T0 + 1000 if offset is None else offset, settings_hash, 0, 1,
        [Second(second, cells) for second, cells in sorted((contents or {}).items())],
    )  # fmt: skip


def fresh(
    topic: str, contents: dict[int, list[PopulationCells]], offset: int, *, partition: int = 0
) -> FreshCells:
    seconds = [Second(second, cells) for second, cells in contents.items()]
    return FreshCells(1, topic, partition, 0, offset, 0, HASH, seconds)


def command(name: str, ident: str, *, rollout: str = NAME, **fields: object) -> Command:
    arguments = fields.pop("arguments", {})
    return Command(
        v=1, command_id=ident, rollout=rollout, ts_us=0, command=name, arguments=arguments, by="op", **fields
    )  # type: ignore[arg-type]


def start_command(policy: str | None = None, ident: str = "c0", **spec: object) -> Command:
    given = {**SPEC, **spec}
    if policy is not None:
        given["policy"] = policy
    return command("start", ident, arguments={"spec": given})


def us(second: float) -> int:
    return round(second * 1_000_000)


@dataclass
class Bench:
    """A gate with what it wrote, as a broker would keep it; `crash()` makes a successor from that alone."""

    core: GateCore
    sources: dict[str, int]
    settings: GateSettings
    effects: list[Effect] = field(default_factory=list)
    finals: list[FinalBuckets] = field(default_factory=list)
    commands: list[tuple[int, Command]] = field(default_factory=list)
    states: dict[str, bytes] = field(default_factory=dict)
    control: dict[str, Directive] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    @classmethod
    def new(cls, sources: dict[str, int] | None = None, **changes: object) -> Bench:
        known = sources or SOURCES
        configured = settings(**changes)
        return cls(GateCore(0, known, configured), known, configured)

    @classmethod
    def started(
        cls, policy: str | None = None, sources: dict[str, int] | None = None, **changes: object
    ) -> Bench:
        bench = cls.new(sources, **changes)
        bench.command(start_command(policy), us(T0))
        return bench

    def write(self, effects: Iterable[Effect]) -> list[Effect]:
        written = list(effects)
        for effect in written:
            self.effects.append(effect)
            for state in effect.states:
                value = encode_state(state)
                if value is None:
                    self.states.pop(state.key, None)
                else:
                    self.states[state.key] = value
            if effect.directive is not None:
                self.control[effect.name] = effect.directive
            if effect.rollout is not None:
                self.rollouts[effect.name] = effect.rollout
        return written

    def command(self, one: Command, now_us: int) -> list[Effect]:
        offset = len(self.commands)
        self.commands.append((now_us, one))
        return self.write(self.core.on_command(one, offset, now_us))

    def read(self, one: FinalBuckets) -> None:
        self.finals.append(one)
        self.core.on_final(one)

    def close(
        self,
        second: int,
        pairs: list[PopulationCells] | None = None,
        requests: list[PopulationCells] | None = None,
        **fields: object,
    ) -> None:
        """Every source closes this second, with this content in partition 0."""
        closed_from = second if self.finals else 0
        for topic, count in self.sources.items():
            for partition in range(count):
                cells = {LOGITS: pairs, REQUESTS: requests}.get(topic) if partition == 0 else None
                contents = {second: cells} if cells else {}
                self.read(final(topic, closed_from, second, contents, partition=partition, **fields))  # type: ignore[arg-type]

    def judge(self, second: int) -> list[Effect]:
        """As it happens: this second has just become complete."""
        return self.write(self.core.judge_complete(us(second + 1 + LATENESS_S)))

    def run(self, first: int, last: int, pairs: object = None, requests: object = None) -> list[Effect]:
        """Close and judge every second; `pairs` and `requests` are functions of the second, or None."""
        effects: list[Effect] = []
        for second in range(first, last + 1):
            self.close(
                second,
                pairs(second) if callable(pairs) else None,
                requests(second) if callable(requests) else None,
            )
            effects += self.judge(second)
        return effects

    def crash(
        self, control: Sequence[tuple[str, Directive | None]] | None = None, restated: Sequence[str] = ()
    ) -> Bench:
        """A successor that has only what was written; it has read the finals again, none judged yet.

        `control`: what it reads of the control topic, where that is not what the gate wrote last.
        """
        core = GateCore(0, self.sources, self.settings)
        core.restore(
            [decode_state(value) for value in self.states.values()],
            control
            or [
                (name, msgspec.convert(msgspec.to_builtins(one), Directive))
                for name, one in self.control.items()
            ],
            self.rollouts.values(),
            restated,
        )
        read_from = core.read_from()
        heir = Bench(
            core, self.sources, self.settings, [], list(self.finals), list(self.commands),
            dict(self.states), dict(self.control), dict(self.rollouts),
        )  # fmt: skip
        for one in self.finals:
            appended_us = us(one.closed_through + 1 + LATENESS_S)
            if read_from.finals_from_us is not None and appended_us >= read_from.finals_from_us:
                core.on_final(one)
        for offset, (now_us, one_command) in enumerate(self.commands):
            if offset >= read_from.command_offset:
                heir.write(core.on_command(one_command, offset, now_us))
        return heir


def decisions(effects: Iterable[Effect]) -> list[Decision]:
    return [effect.decision for effect in effects if effect.decision is not None]


def kinds(effects: Iterable[Effect]) -> list[str]:
    return [decision.kind for decision in decisions(effects)]


def healthy_pairs(count: int = 10, score: float = 0.012) -> object:
    return lambda _second: [PopulationCells(canary(), [pair_cell([score] * count)])]


def quick_requests(count: int = 10, ttft_us: int = 100_000) -> object:
    return lambda _second: [PopulationCells(canary(differs=0), [request_cell([ttft_us] * count)])]
