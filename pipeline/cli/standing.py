"""Where roll-outs stand, as the gate's topics tell it: pure reading, and a human's lines."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from pipeline.cli.gate_link import newest, require_topics
from pipeline.config import KafkaConfig
from pipeline.core.gate.state import RolloutMemory, StateError, decode_state
from pipeline.workers.records import Record
from schemas.control import Cause, Directive
from schemas.records import UnknownVersionError, read_json
from schemas.topics import Topic


class Standing(Struct, frozen=True, kw_only=True):
    """One roll-out. Times in µs; `told_us`: when the gate last wrote its memory."""

    rollout: str
    generation: int
    epoch: int
    state: str
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
    cause: Cause | None


async def read_standings(kafka: KafkaConfig) -> list[Standing]:
    """Every roll-out that a gate remembers, by name."""
    await require_topics(kafka, (Topic.STATE, Topic.CONTROL))
    states, _ = await newest(kafka, Topic.STATE)
    control, _ = await newest(kafka, Topic.CONTROL)
    return standings(states.values(), control.values())


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
        cause=memory.cause,
    )


def human(one: Standing, now_us: int) -> str:
    """A few lines for a person."""
    split = " · ".join(f"{version} {percent:g} %" for version, percent in one.weights.items())
    state = f"{one.state}, retired" if one.retired else one.state
    lines = [f"{one.rollout}: {state} · generation {one.generation} epoch {one.epoch} · {split}"]
    if one.cause is not None:
        lines.append(f"  because of {cause_line(one.cause)}")
    told = (
        ("deciding", _deciding(one, now_us)),
        ("lease", _lease(one, now_us)),
        ("waits for", _waits(one)),
    )
    for label, text in told:
        if text:
            lines.append(f"  {label}: {text}")
    return "\n".join(lines)


def deciding(one: Standing, now_us: int, silent_after_us: int = 20_000_000) -> tuple[bool, str]:
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


def _deciding(one: Standing, now_us: int) -> str:
    yes, why = deciding(one, now_us)
    return f"{'yes' if yes else 'no'}, {why}"


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


def _waits(one: Standing) -> str:
    return one.waiting if one.state in ("observing", "paused") and not one.retired else ""


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
