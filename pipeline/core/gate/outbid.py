"""Records on the control topic that this gate did not write, and how it goes above them. Pure.

Routers obey the greatest (generation, epoch), whoever wrote it. So the gate takes over the greatest numbers
it meets and writes the next ones: a foreign record uses numbers up, and changes nothing else. A roll-out
whose generation is renumbered stays the same run, with the same evidence, step and state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pipeline.core.gate.state import RolloutMemory
from schemas.control import MAX_EPOCH, MAX_GENERATION, Directive
from schemas.control_log import numbers

LAST: Final = (MAX_GENERATION, MAX_EPOCH)
"""Nothing can be written above these numbers."""


def above(memory: RolloutMemory, directive: Directive) -> RolloutMemory:
    """With numbers so great that the next epoch passes this directive; nothing else changes.

    Only above LAST there is no next one: there the gate writes the same numbers, which routers that start
    later obey, as the newest record, and running ones do not.
    """
    theirs = numbers(directive)
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


@dataclass(slots=True)
class Topmost:
    """What the control topic says of one roll-out."""

    newest: Directive | None = None
    """None: a tombstone, or no directive."""
    greatest: Directive | None = None

    def read(self, directive: Directive | None) -> None:
        """The next record, in log order."""
        self.newest = directive
        if directive is not None and (self.greatest is None or numbers(self.greatest) < numbers(directive)):
            self.greatest = directive


def take_over(memory: RolloutMemory, topmost: Topmost) -> tuple[RolloutMemory, bool]:
    """What a new owner goes on with, and whether the control topic says something else than its memory.

    Without transactions the directive may have been written and the state not: a trip wins.
    """
    newest, greatest = topmost.newest, topmost.greatest
    if greatest is None or numbers(greatest) <= (memory.generation, memory.epoch):
        says_less = newest is None and not memory.retired
        return memory, says_less or (newest is not None and not _says(newest, memory))
    if greatest.generation == memory.generation and greatest.state == "tripped" and not memory.final:
        memory = replace(
            memory,
            decided_epoch=greatest.epoch,
            state="tripped",
            weights=greatest.weights,
            last_promoted=greatest.last_promoted,
            level=greatest.level,
            cause=greatest.cause,
        )
    return above(memory, greatest), True


def _says(directive: Directive, memory: RolloutMemory) -> bool:
    return (
        directive.generation == memory.generation
        and directive.epoch == memory.epoch
        and directive.state == memory.state
        and directive.weights == memory.weights
        and directive.last_promoted == memory.last_promoted
        and directive.level == memory.level
    )
