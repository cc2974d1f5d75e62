"""Which records of the control topic a router may believe, and how many of the others it met, by reason."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Protocol

import msgspec

from agents.router.core import is_split
from schemas.control import Directive
from schemas.control_log import Stated
from schemas.records import read_json
from schemas.signing import Verdict
from schemas.topics import Topic, gating_partition


class Trusting(Protocol):
    """Keys that are trusted; a file of them may change while a router runs."""

    def check(
        self, topic: Topic, key: bytes | None, value: bytes | None, header: bytes | None, now_us: int
    ) -> Verdict:
        """As `schemas.signing.Trust.check`."""

    def poll(self, now_s: float) -> None:
        """Look whether they changed, at most once a second of this monotonic time. May read a file."""


class Ignored(StrEnum):
    """Why a record changed nothing, besides what its signature's verdict says."""

    TOMBSTONE = "tombstone"
    MALFORMED = "malformed"
    """No directive, or under another key or in another partition than a gate would put it."""
    REPLAYED = "replayed"
    """Its (generation, epoch) is not greater than every one seen: written once more, or by nobody we know."""
    TOO_MANY = "too_many"
    """Of one roll-out more than a router holds."""
    EXPIRED = "expired"
    """Its lease is over, and it would have raised a version under test."""


REASONS = (*Ignored, *(verdict for verdict in Verdict if verdict is not Verdict.TRUSTED))


class ControlReading:
    """Counts are kept for as long as the router runs."""

    def __init__(self, trust: Trusting | None) -> None:
        """`trust` None: signatures are not required."""
        self._trust = trust
        self._ignored: Counter[Ignored | Verdict] = Counter()

    @property
    def verifies(self) -> bool:
        """Whether signatures are required."""
        return self._trust is not None

    @property
    def malformed(self) -> int:
        """Records that say nothing, signed or not."""
        return self._ignored[Ignored.MALFORMED] + self._ignored[Ignored.TOMBSTONE]

    @property
    def ignored(self) -> int:
        """Records that changed nothing, for whatever reason."""
        return self._ignored.total()

    def poll(self, now_s: float) -> None:
        """Look whether other keys are trusted now. May read a file."""
        if self._trust is not None:
            self._trust.poll(now_s)

    def count(self, reason: Ignored | Verdict) -> None:
        """A record was ignored."""
        self._ignored[reason] += 1

    def gauges(self) -> dict[str, int]:
        """Every reason, whether it was met or not."""
        return {reason.value: self._ignored[reason] for reason in REASONS}

    def read(
        self, partition: int, key: bytes | None, value: bytes | None, header: bytes | None
    ) -> Stated | Ignored:
        """The directive that a record states, believed or not; else why it is none.

        A tombstone says nothing: no gate writes one, and a roll-out that was forgotten would obey an older
        record that comes after it, and a trip be undone. Nor does anything else that is no directive, or
        stands under another key or in another partition than a gate would put it.
        """
        if value is None:
            return Ignored.TOMBSTONE
        directive = _directive(partition, key, value)
        return Ignored.MALFORMED if directive is None else Stated(directive, value, header)

    def judge(self, stated: Stated, now_us: int) -> Verdict:
        """What its signature is worth: TRUSTED of all where none is required."""
        if self._trust is None:
            return Verdict.TRUSTED
        key = stated.directive.rollout.encode()
        return self._trust.check(Topic.CONTROL, key, stated.value, stated.header, now_us)


def _directive(partition: int, key: bytes | None, value: bytes) -> Directive | None:
    try:
        directive = read_json(value, Directive)
    except msgspec.DecodeError:
        return None
    in_place = key == directive.rollout.encode() and partition == gating_partition(directive.rollout)
    return directive if in_place and is_split(directive) else None
