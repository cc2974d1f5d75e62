"""What a gate reads outside its group when it takes a seat: what was written, and what happened since."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pipeline.core.gate.gating import ReadFrom
from pipeline.core.gate.state import StateError, StateRecord, decode_state
from pipeline.workers.broker import RangeReader
from pipeline.workers.dead_letters import VersionError
from pipeline.workers.gate_signatures import UNSIGNED, GateSignatures
from pipeline.workers.gate_watch import directive_of, name_of
from pipeline.workers.records import Partition, Record
from schemas.control import Directive, Rollout
from schemas.control_log import GreatestBelieved, Stated
from schemas.plain import Log, Plain
from schemas.records import UnknownVersionError, read_json
from schemas.signing import SIGNATURE
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.gate")

MEMORY: Final = (Topic.STATE, Topic.CONTROL, Topic.ROLLOUTS)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The newest record per key of a gating partition's compacted topics; of control the greatest, too."""

    states: list[StateRecord] = field(default_factory=list)
    control: list[tuple[str, Directive | None]] = field(default_factory=list)
    """Key and directive, None where it is none, in log order."""
    rollouts: list[Rollout] = field(default_factory=list)
    restated: set[str] = field(default_factory=set)
    """Roll-outs whose newest directive is believed, and signed with another key than the present one."""
    control_end: int = 0
    """Where the control topic goes on."""


async def remembered(
    reader: RangeReader, partition: int, signatures: GateSignatures = UNSIGNED
) -> Remembered:
    """Read state, directives and roll-outs of a gating partition to their ends.

    Records that cannot be read are none of ours: said and passed over. The next directive stands above them.
    A directive that no trusted key signed counts as none. One that another key than the present one signed is
    the gate's own, and is to be written anew: everything on the topic is then signed with one key.
    Raises VersionError for states and roll-outs that a newer gate wrote.
    """
    places = [Partition(topic.value, partition) for topic in MEMORY]
    begins, ends = await reader.begin_offsets(places), await reader.end_offsets(places)
    newest: dict[tuple[Topic, bytes], Record] = {}
    now_us = time.time_ns() // 1000

    def believed(stated: Stated) -> bool:
        headers = {} if stated.header is None else {SIGNATURE: stated.header}
        return signatures.believes(stated.directive.rollout.encode(), stated.value, headers, now_us)

    greatest = GreatestBelieved(believed)
    async for record in reader.read({place: (begins[place], ends[place]) for place in places}):
        newest[record.topic, record.key or b""] = record
        if record.topic is Topic.CONTROL:
            directive = directive_of(name_of(record.key), record.value)
            if directive is not None:
                greatest.offer(Stated(directive, record.value, record.headers.get(SIGNATURE)))
    found = Remembered(control_end=ends[Partition(Topic.CONTROL.value, partition)])
    found.control.extend(greatest.settle().items())
    for record in newest.values():
        if record.topic is Topic.CONTROL:
            name = name_of(record.key)
            said = directive_of(name, record.value)
            if signatures.is_current(record.headers):
                if not signatures.believes(record.key, record.value, record.headers, now_us):
                    said = None
            elif not signatures.trusts(record.key, record.value, record.headers, now_us):
                said = None  # counted where the greatest was looked for
            elif said is not None:
                found.restated.add(name)
            found.control.append((name, said))
        elif record.value:
            _sort_in(found, record)
    return found


def _sort_in(found: Remembered, record: Record) -> None:
    try:
        if record.topic is Topic.STATE:
            found.states.append(decode_state(record.value))
        else:
            found.rollouts.append(read_json(record.value, Rollout))
    except UnknownVersionError as error:
        # Passed over, a newer gate's roll-out would be forgotten. (A directive may be of any version: it says
        # nothing that the state beside it does not, and its topic is the one that others reach for.)
        raise VersionError(record, error.version) from None
    except (StateError, msgspec.MsgspecError) as error:
        kind = Plain(type(error).__name__)
        log.error("%s: offset %d cannot be read and is passed over: %s", record.place, record.offset, kind)


async def since(
    reader: RangeReader, partition: int, read_from: ReadFrom, ends: dict[Partition, int]
) -> AsyncIterator[Record]:
    """Finals, then fresh cells, then commands, each from where the core needs them to its end in `ends`."""
    finals, fresh, commands = (
        Partition(topic.value, partition) for topic in (Topic.BUCKETS, Topic.PARTIALS, Topic.COMMANDS)
    )
    for place, from_us in ((finals, read_from.finals_from_us), (fresh, read_from.fresh_from_us)):
        if from_us is None:
            continue
        first = (await reader.offsets_at({place: from_us}))[place]
        if first is not None:
            async for record in reader.read({place: (first, ends[place])}):
                yield record
    begins = await reader.begin_offsets([commands])
    first = max(read_from.command_offset, begins[commands])
    async for record in reader.read({commands: (first, ends[commands])}):
        yield record
