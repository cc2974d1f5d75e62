"""`klaxon explain ROLLOUT`: a decision as a paragraph, and a verdict's history, from the log alone."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from dataclasses import replace as with_
from datetime import UTC, datetime
from typing import Final

import click
import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.gate_link import believed_directives, kept, newest, require_topics, run
from pipeline.cli.options import config_option, json_option
from pipeline.cli.printing import counted, printed
from pipeline.cli.standing import Standing, obstacles_of, silent_after_us, standings, step_due
from pipeline.config import Config, KafkaConfig
from pipeline.core.gate.answer import Obstacle
from pipeline.core.gate.explanation import Explanation, explain, waiting_text
from pipeline.core.gate.explanation_log import (
    ROLLOUTS_KEPT,
    DecisionLog,
    HistoryRow,
    Wanted,
    in_force,
    telling,
)
from pipeline.core.gate.explanation_numbers import amount, moment
from pipeline.core.gate.explanation_reasons import Account
from pipeline.core.spelling import nearest
from pipeline.core.visible import visible
from pipeline.policy_file import PolicyError, parse_policy
from pipeline.workers.acl_table import Operation
from pipeline.workers.records import Partition, Record
from schemas.control import Decision, Directive, Rollout
from schemas.events import Name
from schemas.records import UnknownVersionError, read_json
from schemas.topics import Topic, gating_partition

READS: Final = (Operation.READ, Operation.DESCRIBE)
MOST_US: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Read:
    """What the topics hold about a roll-out."""

    log: DecisionLog
    rollouts: list[Rollout] = field(default_factory=list)
    directive: Directive | None = None
    """The newest on the control topic that is believed."""
    standing: Standing | None = None
    names: tuple[str, ...] = ()
    """Roll-outs that the gate remembers."""
    newest: Directive | None = None
    """Of the newest decision that has one."""
    unreadable: int = 0
    other_version: int = 0


def _time_us(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """`2026-11-30T12:03:04Z`, the same with an offset, or µs since 1970; without either it is UTC."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,19}", value) and int(value) <= MOST_US:
        return int(value)
    try:
        read = datetime.fromisoformat(value)
        at = read.replace(tzinfo=UTC) if read.tzinfo is None else read
        since = at - _EPOCH
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no time; write it like 2026-11-30T12:03:04Z, or as µs since 1970", param=parameter
        ) from None
    return max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


@click.command("explain")
@click.argument("name", metavar="ROLLOUT")
@click.option(
    "--generation", type=click.IntRange(0, MOST_US), metavar="G", help="The newest of this generation."
)
@click.option(
    "--epoch",
    type=click.IntRange(0, MOST_US),
    metavar="E",
    help="The one behind the directive of this epoch.",
)
@click.option(
    "--at", "at_us", callback=_time_us, metavar="TIME",
    help="The newest that had fallen then: 2026-11-30T12:03:04Z (UTC unless it says otherwise), or µs.",
)  # fmt: skip
@click.option("--history", is_flag=True, help="Also what each rule said at every decision that is kept.")
@config_option
@json_option
def explain_command(
    name: str,
    generation: int | None,
    epoch: int | None,
    at_us: int | None,
    history: bool,
    config: Config,
    as_json: bool,
) -> int:
    """Why does the roll-out stand where it does? Its newest decision, or another one, in plain words.

    Rule and capability, numbers and limit, where the deviation sits, the pairs that prove it; where nothing
    is decided, what is missing and how long that takes at the present rate. Read from klaxon.decisions and
    klaxon.rollouts; exit code 4 if they hold nothing about it.

    \b
    Example:
      klaxon explain chat
      klaxon explain chat --at 2026-11-30T12:03:04Z --history
    """
    _check_name(name)
    read = run(_read(config, DecisionLog(name, Wanted(generation, epoch, at_us), history)))
    if read.log.found is None:
        raise CommandError(_absent(read), Exit.NOT_ENOUGH_DATA)
    told = _told(read, config, time.time_ns() // 1000)
    if as_json:
        click.echo(msgspec.json.encode(told.as_json()).decode())
    else:
        printed(told.render)
    return Exit.OK


def _check_name(name: str) -> None:
    try:
        msgspec.convert(name, Name)
        name.encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise CommandError(
            f"{visible(repr(name[:60]))} is no roll-out's name: {error}; `klaxon status` lists them",
            Exit.USAGE,
        ) from None


@dataclass(frozen=True, slots=True)
class Told:
    """Everything that is said, as JSON or to a person."""

    rollout: str
    found: Account
    explanation: Explanation
    standing: Account | None
    standing_explanation: Explanation | None
    waits_for: tuple[Obstacle, ...] | None
    """None: the roll-out waits for nothing, or an earlier decision was asked for."""
    step: str
    notes: tuple[str, ...]
    history: tuple[HistoryRow, ...] | None
    history_dropped: int

    def paragraphs(self) -> list[str]:
        """For a person, in the order in which they are wanted."""
        found = [self.explanation.text]
        if self.standing_explanation is not None:
            found.append(f"What it stands on: {self.standing_explanation.text}")
        if self.waits_for is not None:
            found.append(waiting_text(self.waits_for, self.step))
        return [visible(one) for one in (*found, *self.notes)]

    def as_json(self) -> dict[str, object]:
        """One object. `history` only where it was asked for."""
        told: dict[str, object] = {
            "rollout": self.rollout,
            "text": "\n\n".join(self.paragraphs()),
            "reasons": self.explanation.reasons,
            "decision": self.found.decision,
            "stands_on": None
            if self.standing is None or self.standing_explanation is None
            else {"reasons": self.standing_explanation.reasons, "decision": self.standing.decision},
            "waits_for": self.waits_for,
            "notes": self.notes,
        }
        if self.history is not None:
            told |= {"history": self.history, "history_dropped": self.history_dropped}
        return told

    def render(self, console: Console) -> None:
        """Paragraphs, then the history."""
        for at, one in enumerate(self.paragraphs()):
            if at:
                console.print()
            console.print(Text(one))
        if self.history is not None:
            console.print()
            _print_history(console, self.history, self.history_dropped)


def _told(read: Read, config: Config, now_us: int) -> Told:
    log = read.log
    assert log.found is not None
    notes: list[str] = []
    found = _with_policy(log.found, read.rollouts, notes)
    standing = None if log.standing is None else _with_policy(log.standing, read.rollouts, [])
    waits_for, step = None, ""
    now = read.standing
    if log.wanted.newest and now is not None and not now.retired and now.state not in ("tripped", "promoted"):
        waits_for = obstacles_of(now, now_us, silent_after_us(config.gate))
        step = "" if now.progress is None else step_due(now.progress)
    if log.wanted.newest:
        notes += _contradiction(read)
    return Told(
        rollout=log.rollout,
        found=found,
        explanation=explain(found),
        standing=standing,
        standing_explanation=None if standing is None else explain(standing),
        waits_for=waits_for,
        step=step,
        notes=(*notes, *_unread(read)),
        history=tuple(log.rows) if log.keeps_history else None,
        history_dropped=log.rows_dropped,
    )


def _with_policy(account: Account, rollouts: list[Rollout], notes: list[str]) -> Account:
    """With spec and policy of that time, as far as they are kept and can be read."""
    directive = account.decision.directive
    told = in_force(rollouts, account.decision)
    if told is None or directive is None:
        return account
    if told.policy_hash != directive.policy_hash:
        notes.append(
            "The policy of that time is no longer on klaxon.rollouts: what a rule's action was is not told."
        )
        return with_(account, spec=told.spec)
    try:
        policy = parse_policy(told.policy)
    except PolicyError as error:
        notes.append(f"The policy of that time cannot be read by this release ({error}).")
        return with_(account, spec=told.spec)
    return with_(account, spec=told.spec, policy=policy)


def _contradiction(read: Read) -> list[str]:
    """Decisions carry no signature, directives do: where they differ, routers go by the directive."""
    said, decided = read.directive, read.newest
    if said is None or decided is None or (said.generation, said.epoch) < (decided.generation, decided.epoch):
        return []
    if _content(said) == _content(decided):
        return []
    return [
        f"But the newest directive on klaxon.control (generation {said.generation}, epoch {said.epoch},"
        f" {said.state}) says something else than the newest decision: routers obey the directive. Find out"
        " who may write klaxon.decisions and klaxon.control (docs/security.md)."
    ]


def _content(directive: Directive) -> Directive:
    return replace(directive, epoch=0, ts_us=0, lease_until_us=0, dead_man_us=0)


def _unread(read: Read) -> list[str]:
    notes = []
    if read.other_version:
        notes.append(
            f"{counted(read.other_version, 'decision')} of another version left out: the release that wrote"
            " them can read them."
        )
    if read.unreadable:
        notes.append(
            f"{counted(read.unreadable, 'record')} under this name left out: no gate of this release wrote"
            " them."
        )
    return notes


def _absent(read: Read) -> str:
    """Why there is nothing to explain, and what would help."""
    log = read.log
    name, left_out = visible(repr(log.rollout)), " ".join(("", *_unread(read)))
    if not log.read:
        known = [one for one in read.names if one != log.rollout]
        told = nearest(log.rollout, known) if known else "; start one with `klaxon rollout start SPEC`"
        if log.rollout in read.names:
            told = ": they are older than klaxon.decisions keeps; `klaxon status` says where it stands"
        return f"klaxon.decisions holds nothing about {name}{visible(told)}{left_out}"
    wanted, parts = log.wanted, []
    if wanted.generation is not None:
        parts.append(f"of generation {wanted.generation}")
    if wanted.epoch is not None:
        parts.append(f"up to epoch {wanted.epoch}")
    if wanted.at_us is not None:
        parts.append(f"up to {moment(wanted.at_us)}")
    first = "" if log.first_us is None else f"; the oldest that is kept fell at {moment(log.first_us)}"
    last = "" if log.last_generation is None else f", the newest is of generation {log.last_generation}"
    return f"no decision about {name} {' '.join(parts)}{first}{last}{left_out}"


def _print_history(console: Console, rows: tuple[HistoryRow, ...], dropped: int) -> None:
    shown, left_out = telling(rows)
    if not shown:
        console.print(Text("No decision that is kept carries a verdict."))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("rule", "scope", "at", "gen", "epoch", "decision", "verdict"):
        table.add_column(column)
    for column in ("value", "limit", "samples"):
        table.add_column(column, justify="right")
    for one in shown:
        table.add_row(*(Text(visible(cell)) for cell in _cells(one)))
    console.print(table)
    if left_out:
        console.print(Text(f"{counted(left_out, 'part')} never over the limit left out; --json has them."))
    if dropped:
        console.print(Text(f"{dropped:,} older verdicts left out; klaxon.decisions has them."))


def _cells(one: HistoryRow) -> tuple[str, ...]:
    return (
        one.rule,
        one.scope,
        moment(one.at_us).removesuffix(" UTC"),
        "" if one.generation is None else str(one.generation),
        "" if one.epoch is None else str(one.epoch),
        one.kind,
        one.verdict.replace("_", " "),
        "–" if one.value is None else amount(one.metric, one.value, one.limit),
        "–" if one.limit is None else amount(one.metric, one.limit),
        f"{one.samples:,}",
    )


async def _read(config: Config, log: DecisionLog) -> Read:
    believed = believed_directives(config)
    kafka = config.kafka
    await require_topics(kafka, (Topic.DECISIONS, Topic.ROLLOUTS, Topic.STATE, Topic.CONTROL), to=READS)
    read = Read(log)
    # Control first: what it then holds of a decision, the decisions hold too.
    control, _ = await newest(kafka, Topic.CONTROL)
    await _decisions(kafka, read)
    await _rollouts(kafka, read)
    states, _ = await newest(kafka, Topic.STATE)
    trusted = [record for record in control.values() if believed(record)]
    for record in trusted:
        if record.key == log.rollout.encode():
            read.directive = _directive(record)
    known = standings(states.values(), trusted)
    read.names = tuple(one.rollout for one in known)
    read.standing = next((one for one in known if one.rollout == log.rollout), None)
    return read


async def _decisions(kafka: KafkaConfig, read: Read) -> None:
    place = Partition(Topic.DECISIONS.value, gating_partition(read.log.rollout))
    async for record in kept(kafka, place):
        if record.key != read.log.rollout.encode():
            continue
        try:
            decision = read_json(record.value, Decision)
        except UnknownVersionError:
            read.other_version += 1
            continue
        except msgspec.MsgspecError:
            read.unreadable += 1
            continue
        directive = decision.directive
        if directive is not None and directive.rollout != read.log.rollout:
            read.unreadable += 1
            continue
        read.log.take(decision)
        if directive is not None:
            read.newest = directive


async def _rollouts(kafka: KafkaConfig, read: Read) -> None:
    place = Partition(Topic.ROLLOUTS.value, gating_partition(read.log.rollout))
    async for record in kept(kafka, place):
        if record.key != read.log.rollout.encode():
            continue
        try:
            read.rollouts.append(read_json(record.value, Rollout))
        except msgspec.MsgspecError:
            continue  # no gate's, or of a release that this one cannot read
        del read.rollouts[:-ROLLOUTS_KEPT]


def _directive(record: Record) -> Directive | None:
    try:
        return read_json(record.value, Directive)
    except msgspec.MsgspecError:
        return None  # not ours; the gate overrules it with its next record
