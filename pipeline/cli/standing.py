"""Where roll-outs stand, as the gate's topics tell it: pure reading, and a human's lines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from pipeline.cli.gate_link import believed_directives, newest, require_topics
from pipeline.config import Config, GateConfig
from pipeline.core.cells import node_and_context
from pipeline.core.gate.answer import Obstacle, Told, obstacles, span
from pipeline.core.gate.progress import Progress
from pipeline.core.gate.state import RolloutMemory, StateError, decode_state
from pipeline.core.visible import visible
from pipeline.workers.records import Record
from schemas.control import Cause, Directive, RolloutState, Segment
from schemas.records import UnknownVersionError, read_json
from schemas.topics import Topic

_EVIDENCE: Final = re.compile(r"E \S+ of [0-9.]+(e\+[0-9]+)?(, K \S+ of [0-9.]+(e\+[0-9]+)?)?")
"""What a sequential rule says of itself in its reason."""
SILENT_AFTER_US: Final = 20_000_000
SAID_ABOVE: Final = ("retired", "final", "gate_away", "blind", "lease_over")
"""Obstacles that stand on the lines `deciding` and `lease`."""


def silent_after_us(gate: GateConfig) -> int:
    """A gate that has not written for so long is away: it misses its fourth renewal."""
    return 4 * gate.renew_s * 1_000_000


class Standing(Struct, frozen=True, kw_only=True):
    """One roll-out. Times in µs; `told_us`: when the gate last wrote its memory."""

    rollout: str
    generation: int
    epoch: int
    state: RolloutState
    retired: bool
    weights: dict[str, float]
    last_promoted: dict[str, float]
    lease_until_us: int | None
    dead_man_until_us: int | None
    """When routers return to the last promoted split, unless the lease is renewed."""
    level: int
    fallback: str | None
    policy_hash: str | None
    folded: int
    step_pairs: int
    told_us: int
    waiting: str
    blind: str
    evidence_from: int
    progress: Progress | None
    cause: Cause | None
    ejected_nodes: tuple[str, ...] = ()
    excluded_segments: tuple[Segment, ...] = ()
    """As the newest directive says."""


async def read_standings(config: Config) -> list[Standing]:
    """Every roll-out that a gate remembers, by name."""
    believed = believed_directives(config)
    await require_topics(config.kafka, (Topic.STATE, Topic.CONTROL))
    states, _ = await newest(config.kafka, Topic.STATE)
    control, _ = await newest(config.kafka, Topic.CONTROL)
    return standings(states.values(), filter(believed, control.values()))


def standings(states: Iterable[Record], control: Iterable[Record]) -> list[Standing]:
    """From the newest records of state and control."""
    directives = {}
    for record in control:
        if not record.value:
            continue
        try:
            directive = read_json(record.value, Directive)
        except msgspec.MsgspecError:
            continue  # not ours; the gate overrules it with its next record
        directives[directive.rollout] = directive
    found: list[Standing] = []
    for record in states:
        if not record.value:
            continue
        try:
            memory = decode_state(record.value)
        except (StateError, UnknownVersionError):
            continue  # of another version of the gate, which says so itself
        if isinstance(memory, RolloutMemory):
            found.append(_standing(memory, directives.get(memory.rollout), record.append_us))
    return sorted(found, key=lambda one: one.rollout)


def _standing(memory: RolloutMemory, directive: Directive | None, told_us: int) -> Standing:
    return Standing(
        rollout=memory.rollout,
        generation=memory.generation,
        epoch=memory.epoch,
        state=memory.state,
        retired=memory.retired,
        weights=memory.weights,
        last_promoted=memory.last_promoted,
        lease_until_us=None if directive is None else directive.lease_until_us,
        dead_man_until_us=None if directive is None else directive.ts_us + directive.dead_man_us,
        level=memory.level,
        fallback=None if directive is None else directive.fallback,
        policy_hash=None if directive is None else directive.policy_hash,
        folded=memory.folded,
        step_pairs=memory.step_pairs,
        told_us=told_us,
        waiting=memory.waiting,
        blind=memory.blind,
        evidence_from=memory.evidence_from,
        progress=memory.progress,
        cause=memory.cause,
        ejected_nodes=() if directive is None else directive.ejected_nodes,
        excluded_segments=() if directive is None else directive.excluded_segments,
    )


def obstacles_of(one: Standing, now_us: int, silent_after_us: int = SILENT_AFTER_US) -> tuple[Obstacle, ...]:
    """Why nothing is deciding about it, the outermost reason first; empty: its next step is due."""
    told = Told(
        rollout=one.rollout,
        generation=one.generation,
        state=one.state,
        retired=one.retired,
        paused_by=_held_by(one),
        blind=one.blind,
        evidence_from=one.evidence_from,
        progress=one.progress,
        told_us=one.told_us,
        lease_until_us=one.lease_until_us,
        silent_after_us=silent_after_us,
    )
    return obstacles(told, now_us)


def _held_by(one: Standing) -> str | None:
    """The rule behind a pause or an exclusion; None: no rule, or unknown. A cause that names an ejected node
    is the ejection's, which came after; of a pause, one in an excluded segment is the exclusion's."""
    if one.cause is None:
        return None
    located = one.cause.located
    excluded = {(part.dimension, part.value) for part in one.excluded_segments}
    if one.state == "paused" and located is not None and (located.dimension, located.value) in excluded:
        return None
    dimension, _, value = (one.cause.scope or "").partition("=")
    node = node_and_context(value)[0] if dimension == "node_context" else value
    ejection = dimension in ("node", "node_context") and node in one.ejected_nodes
    return None if ejection else one.cause.rule


def human(one: Standing, now_us: int, silent_after_us: int = SILENT_AFTER_US) -> str:
    """What stands, what is deciding, what each rule has, and what the next step waits for, for a person."""
    split = " · ".join(f"{version} {percent:g} %" for version, percent in one.weights.items())
    state = f"{one.state}, retired" if one.retired else one.state
    lines = [f"{one.rollout}: {state} · generation {one.generation} epoch {one.epoch} · {split}"]
    if one.cause is not None:
        lines.append(f"  because of {cause_line(one.cause)}")
        lines.append(f"    → `klaxon explain {one.rollout}`")
    if left_out := _left_out(one):
        lines.append(f"  without canary: {left_out}")
    yes, why = deciding(one, now_us, silent_after_us)
    lines.append(f"  deciding: {'yes' if yes else 'no'}, {why}")
    if lease := _lease(one, now_us):
        lines.append(f"  lease: {lease}")
    found = obstacles_of(one, now_us, silent_after_us)
    if one.progress is not None and yes:
        lines += [f"  {line}" for line in progress_lines(one.progress)]
    for obstacle in found:
        if obstacle.code not in SAID_ABOVE:
            lines.append(f"  waits for: {obstacle.sentence}")
        if obstacle.remedy != "wait":
            lines.append(f"    → {obstacle.remedy}")
    return "\n".join(map(visible, lines))


def _left_out(one: Standing) -> str:
    """Nodes and segments that get nothing of the canary, however great its weight is."""
    nodes = [f"node {name}" for name in one.ejected_nodes]
    return ", ".join([*nodes, *(f"{part.dimension} {part.value}" for part in one.excluded_segments)])


def progress_lines(progress: Progress) -> list[str]:
    """Every rule with what it has (a sequential one also its evidence), coverage, and when the next step is
    due."""
    lines = []
    for rule in (*progress.rules, progress.coverage):
        what = "mirrored requests" if rule.rule == "coverage" else "samples"
        rate = f" at {rule.per_s:.3g}/s" if rule.per_s else ""
        value = "" if rule.value is None else f" · {rule.value:.4g}, limit {rule.limit:g}"
        observed = "" if rule.enforcing else " (observes)"
        where = "" if rule.scope == "rollout" else f" in {rule.scope}"
        verdict = rule.verdict.replace("_", " ")
        held = f"{rule.samples} of {rule.needed} {what}{where} in {span(rule.window_s)}{rate}"
        won = _EVIDENCE.search(rule.reason)
        evidence = f" · evidence {won[0]}" if won else ""
        lines.append(f"{rule.rule}{observed}: {verdict} · {held}{value}{evidence}")
    due = step_due(progress)
    return [*lines, f"next step: {due}"] if due else lines


def step_due(progress: Progress) -> str:
    """Which weight step comes next, and when; "" where the last one is an operator's."""
    if progress.next_percent is None and progress.percent != 100:
        return ""
    step = f"{progress.percent:g} % to {progress.next_percent:g} %" if progress.next_percent else "promotion"
    if progress.ready_in_s is None:
        return f"{step}, not by waiting alone"
    when = f"in about {span(progress.ready_in_s)}" if progress.ready_in_s else "at any moment"
    return f"{step}, {when} if all goes on as now"


def deciding(one: Standing, now_us: int, silent_after_us: int = SILENT_AFTER_US) -> tuple[bool, str]:
    """Whether a gate decides about it at present, and why not."""
    if one.retired:
        return False, "retired"
    if one.state in ("tripped", "promoted"):
        return False, f"{one.state} is final until a new generation"
    age_us = now_us - one.told_us
    if age_us > silent_after_us:
        return False, f"no gate has written for {age_us // 1_000_000} s: is `klaxon worker gate` running?"
    if one.blind:
        return False, one.blind
    return True, f"complete through {max(0, now_us // 1_000_000 - one.folded)} s ago"


def _lease(one: Standing, now_us: int) -> str:
    """What routers may still do with the newest directive; "" where nothing depends on it any more."""
    if one.retired or one.state == "tripped" or one.lease_until_us is None or one.dead_man_until_us is None:
        return ""
    over_us = now_us - one.lease_until_us
    if over_us <= 0:
        return f"renewed, valid for {-over_us // 1_000_000} s"
    split = " · ".join(f"{version} {percent:g} %" for version, percent in one.last_promoted.items())
    left_us = max(one.dead_man_until_us, one.lease_until_us) - now_us
    then = (
        f"routers go back to {split} in {left_us // 1_000_000} s"
        if left_us > 0
        else f"routers are back at the last promoted split, {split}"
    )
    return f"ran out {over_us // 1_000_000} s ago, at {clock(one.lease_until_us)}: no weight rises, {then}"


def clock(at_us: int) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at_us // 1_000_000))


def cause_line(cause: Cause) -> str:
    """Rule, numbers, place: why a directive says what it says."""
    parts = [cause.rule]
    if cause.value is not None and cause.limit is not None:
        window = f" over {cause.window_us // 1_000_000} s" if cause.window_us else ""
        parts.append(f"{cause.metric} {cause.value:.4g} > {cause.limit:g}{window}, {cause.samples} samples")
    if cause.scope not in (None, "rollout"):
        parts.append(f"in {cause.scope}")
    if cause.located is not None:
        where = cause.located
        parts.append(
            f"located in {where.dimension} {where.value} ({where.share_of_excess:.0%} of the excess,"
            f" {where.share_of_traffic:.0%} of the traffic)"
        )
    if cause.also:
        parts.append(f"also {', '.join(cause.also)}")
    return " · ".join(parts)
