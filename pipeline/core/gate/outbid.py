"""Records on the control topic that this gate did not write, and how it goes above them. Pure.

Routers obey the greatest (generation, epoch), whoever wrote it. So the gate takes over the greatest numbers
it meets and writes the next ones: a foreign record uses numbers up, and changes nothing else. A roll-out
whose generation is renumbered stays the same run, with the same evidence, step and state.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pipeline.core.gate.state import RolloutMemory
from schemas.control import MAX_EPOCH, MAX_GENERATION, Directive

LAST: Final = (MAX_GENERATION, MAX_EPOCH)
"""Nothing can be written above these numbers."""


def above(memory: RolloutMemory, directive: Directive) -> RolloutMemory:
    """With numbers so great that the next epoch passes this directive; nothing else changes.

    Only above LAST there is no next one: there the gate writes the same numbers, which routers that start
    later obey, as the newest record, and running ones do not.
    """
    theirs = (directive.generation, directive.epoch)
    if theirs < (memory.generation, memory.epoch):
        return memory
    if directive.epoch == MAX_EPOCH and directive.generation < MAX_GENERATION:
        theirs = (directive.generation + 1, 0)
    generation, epoch = max(theirs, (memory.generation, memory.epoch))
    if generation == memory.generation:
        return replace(memory, epoch=epoch)
    # Events carry the numbers that gateways routed by: foreign directives' numbers count for this run, too.
    first = memory.generations.start
    return replace(memory, generation=generation, epoch=epoch, first_generation=first)


def next_epoch(memory: RolloutMemory) -> RolloutMemory:
    """The numbers of the next directive."""
    return replace(memory, epoch=min(memory.epoch + 1, MAX_EPOCH))


def take_over(memory: RolloutMemory, newest: Directive | None) -> tuple[RolloutMemory, bool]:
    """What a new owner goes on with, and whether the control topic says something else than its memory.

    `newest`: the newest directive of this roll-out there, None where there is none. Without transactions the
    directive may have been written and the state not: a trip wins.
    """
    if newest is None:
        return memory, not memory.retired
    if (newest.generation, newest.epoch) <= (memory.generation, memory.epoch):
        return memory, not _says(newest, memory)
    if newest.generation == memory.generation and newest.state == "tripped" and not memory.final:
        memory = replace(
            memory,
            decided_epoch=newest.epoch,
            state="tripped",
            weights=newest.weights,
            last_promoted=newest.last_promoted,
            level=newest.level,
            cause=newest.cause,
        )
    return above(memory, newest), True


def _says(directive: Directive, memory: RolloutMemory) -> bool:
    return (
        directive.generation == memory.generation
        and directive.epoch == memory.epoch
        and directive.state == memory.state
        and directive.weights == memory.weights
        and directive.last_promoted == memory.last_promoted
        and directive.level == memory.level
    )
