"""What a gate reads outside its group when it takes a seat: what was written, and what happened since."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pipeline.core.gate.gating import ReadFrom
from pipeline.core.gate.state import StateError, StateRecord, decode_state
from pipeline.workers.broker import RangeReader
from pipeline.workers.dead_letters import VersionError
from pipeline.workers.records import Partition, Record
from schemas.control import Directive, Rollout
from schemas.records import UnknownVersionError, read_json
from schemas.topics import Topic

log = logging.getLogger("klaxon.gate")

MEMORY: Final = (Topic.STATE, Topic.CONTROL, Topic.ROLLOUTS)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The newest record per key of a gating partition's compacted topics."""

    states: list[StateRecord] = field(default_factory=list)
    directives: list[Directive] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)


async def remembered(reader: RangeReader, partition: int) -> Remembered:
    """Read state, directives and roll-outs of a gating partition to their ends.

    Records that cannot be read are none of ours: said and passed over. The next directive overwrites them.
    Raises VersionError for states and roll-outs that a newer gate wrote.
    """
    places = [Partition(topic.value, partition) for topic in MEMORY]
    begins, ends = await reader.begin_offsets(places), await reader.end_offsets(places)
    newest: dict[tuple[Topic, bytes], Record] = {}
    async for record in reader.read({place: (begins[place], ends[place]) for place in places}):
        newest[record.topic, record.key or b""] = record
    found = Remembered()
    for record in newest.values():
        if record.value:
            _sort_in(found, record)
    return found


def _sort_in(found: Remembered, record: Record) -> None:
    try:
        if record.topic is Topic.STATE:
            found.states.append(decode_state(record.value))
        elif record.topic is Topic.CONTROL:
            found.directives.append(read_json(record.value, Directive))
        else:
            found.rollouts.append(read_json(record.value, Rollout))
    except UnknownVersionError as error:
        # Passed over, a newer gate's roll-out would be forgotten. A directive says nothing that the state
        # beside it does not, and its topic is the one that others reach for.
        if record.topic is not Topic.CONTROL:
            raise VersionError(record, error.version) from None
        log.error("%s: offset %d is passed over: %s", record.place, record.offset, error)
    except (StateError, msgspec.MsgspecError) as error:
        log.error("%s: offset %d cannot be read and is passed over: %s", record.place, record.offset, error)


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
