"""Which halves belong together: groups by key, in log time, bounded by J and by bytes.

A group opens with the first half of a key that was not seen of late, and stays open for J after it. A key is
remembered as long as it keeps coming: with a pair id within 2J, so that an expired or matched group stays as
a tombstone for J; without one within J. So whatever is sent again adds nothing, and what a group decides
depends on no more than 3J of the log (architecture.md, "Pairing"): J that it is open, 2J of silence before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from pipeline.core.texts import DIGEST_BYTES, digests, joined
from schemas.columns import BASELINE, CANARY, CONTROL, I8, LogitColumns

GroupKey: TypeAlias = bytes
"""Digest of the roll-out, signature, pair id (16 bytes each); without a pair id the first two."""

Moment: TypeAlias = tuple[int, int]
"""(log time in µs, bytes read through): where in the log something stands. Neither ever falls."""

_BOTH: Final = 1 << CANARY | 1 << CONTROL
NAMED_MEMORY: Final = 2
ANONYMOUS_MEMORY: Final = 1
"""How many join timeouts a key is remembered after it came."""
_ANONYMOUS_BYTES: Final = DIGEST_BYTES + 16
_NAMED_BYTES: Final = _ANONYMOUS_BYTES + 16


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """The halves of one record; one entry per half."""

    columns: LogitColumns
    offset: int
    positions: I8
    """Index of each event inside its record."""
    event_us: list[int]
    """Completion, cut at append time + 5 s."""


Arrival: TypeAlias = tuple[Halves, int]
"""One half as it came: which record, and which of its halves."""


def group_keys(columns: LogitColumns) -> list[GroupKey]:
    """Which group each half belongs to."""
    rollouts = digests(joined([columns.labels["rollout"]]))
    parts = np.concatenate((rollouts, columns.signature, columns.pair_id), axis=1)
    keys: list[bytes] = parts.view(f"V{_NAMED_BYTES}").ravel().tolist()
    for at in np.flatnonzero(~columns.has_pair_id).tolist():
        keys[at] = keys[at][:_ANONYMOUS_BYTES]
    return keys


def signature_of(key: GroupKey) -> bytes:
    """16 bytes."""
    return key[DIGEST_BYTES:_ANONYMOUS_BYTES]


def pair_id_of(key: GroupKey) -> bytes | None:
    """16 bytes; None where halves are joined by signature alone."""
    return key[_ANONYMOUS_BYTES:] or None


def name_of(key: GroupKey) -> bytes:
    """What a pair is called: its pair id, else its signature."""
    return key[-16:]


@dataclass(slots=True)
class Group:
    """One key's halves while it is open, then what is remembered of it."""

    key: GroupKey
    is_anonymous: bool
    """Joined by signature alone."""
    opened: Moment
    last: Moment
    expected: int = 0
    """Bit mask of arms."""
    generation: int = -1
    """Of the first half."""
    present: int = 0
    """Bit mask of arms that came while it was open."""
    halves: dict[int, Arrival] = field(default_factory=dict)
    """By arm, until nothing more can be scored with them."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Anonymous: number of halves by arm."""
    seen: dict[object, Moment] = field(default_factory=dict)
    """Identity of a half (named: its arm; anonymous: arm, node, time) → when it last came, oldest first."""
    is_open: bool = True

    def begin(self, arm: int, arrival: Arrival, expected: int, generation: int, now: Moment) -> None:
        """The first half of a named group."""
        self.expected = expected
        self.generation = generation
        self.present = 1 << arm
        self.halves[arm] = arrival
        self.seen[arm] = now

    @property
    def memory(self) -> int:
        """How long the key is remembered after it came, in join timeouts."""
        return ANONYMOUS_MEMORY if self.is_anonymous else NAMED_MEMORY

    def comparisons(self) -> list[int]:
        """Arms that were expected or came and are compared with the baseline."""
        arms = self.expected | self.present
        return [arm for arm in (1, 2) if arms >> arm & 1]

    @property
    def compares_two(self) -> bool:
        """Whether both canary and control were expected or came."""
        return (self.expected | self.present) & _BOTH == _BOTH

    def is_complete(self) -> bool:
        """Whether every expected comparison has both its halves."""
        needed = self.expected | self.present | 1 << BASELINE
        return self.present == needed and needed != 1 << BASELINE


class Groups:
    """All groups of one source partition. Bounded: by J of log time and by bytes of further records."""

    def __init__(self, join_timeout_us: int, waiting_bytes: int) -> None:
        """No group yet."""
        self._join_timeout_us = join_timeout_us
        self._waiting_bytes = waiting_bytes
        self._named: dict[GroupKey, Group] = {}
        """In order of `last`, oldest first; so are the anonymous ones."""
        self._anonymous: dict[GroupKey, Group] = {}
        self._opened: deque[Group] = deque()
        """Groups whose time is not up, in order of `opened`."""
        self._open_groups = 0

    def expire(self, now: Moment) -> Iterator[tuple[Group, int]]:
        """Close the groups whose time is up at this record, oldest first, and forget what is long silent.

        Yields each with the log time of its end: its deadline, or that of the record that was too much.
        """
        while self._opened and not self._within(1, self._opened[0].opened, now):
            group = self._opened.popleft()
            if group.is_open:
                self.close(group)
                yield group, min(group.opened[0] + self._join_timeout_us, now[0])
        for remembered, times in ((self._named, NAMED_MEMORY), (self._anonymous, ANONYMOUS_MEMORY)):
            while remembered:
                key, oldest = next(iter(remembered.items()))
                if self._within(times, oldest.last, now):
                    break
                del remembered[key]

    def find(self, key: GroupKey, now: Moment) -> Group:
        """The key's group, opened if the key was not seen of late; notes that it came."""
        is_anonymous = len(key) == _ANONYMOUS_BYTES
        remembered = self._anonymous if is_anonymous else self._named
        group = remembered.pop(key, None)
        if group is None:
            group = Group(key, is_anonymous, now, now)
            self._opened.append(group)
            self._open_groups += 1
        else:
            group.last = now
        remembered[key] = group
        return group

    def came_before(self, group: Group, identity: object, now: Moment) -> bool:
        """Note that this half came; whether the same came as long ago as its key is remembered."""
        seen = group.seen
        if group.is_anonymous:
            # Named halves are three at most; these are as many as were sent.
            while seen and not self._within(ANONYMOUS_MEMORY, next(iter(seen.values())), now):
                del seen[next(iter(seen))]
        before = seen.pop(identity, None) if seen else None
        seen[identity] = now
        return before is not None and self._within(group.memory, before, now)

    def _within(self, times: int, then: Moment, now: Moment) -> bool:
        """Whether `then` is at most so many times J, and so many times the bytes, before `now`."""
        return (
            now[0] - then[0] <= times * self._join_timeout_us
            and now[1] - then[1] <= times * self._waiting_bytes
        )

    def close(self, group: Group) -> None:
        """Nothing more can be scored with an open group's halves."""
        group.is_open = False
        self._open_groups -= 1

    @property
    def open_groups(self) -> int:
        """Groups that halves can still join."""
        return self._open_groups

    @property
    def remembered(self) -> int:
        """Groups held, open or not."""
        return len(self._named) + len(self._anonymous)

    def oldest_wait_us(self, log_us: int) -> int:
        """Log time since the oldest group opened that halves can still join; 0 without any."""
        return next((log_us - group.opened[0] for group in self._opened if group.is_open), 0)

    def waiting_bytes(self, bytes_read: int) -> int:
        """Bytes of records since the oldest group opened whose time is not up."""
        return bytes_read - self._opened[0].opened[1] if self._opened else 0
