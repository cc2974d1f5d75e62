"""Which halves belong together: groups by key, in log time, bounded by J and by bytes.

A group opens with the first half of a key that was not seen of late, and stays open for J after it. A key is
remembered as long as it keeps coming: with a pair id within 2J, so that an expired or matched group stays as
a tombstone for J; without one within J. So whatever is sent again adds nothing, and what a group decides
depends on no more than 3J of the log (architecture.md, "Pairing"): J that it is open, 2J of silence before.

Most keys are of two halves that expect each other and nothing else. For these no group is made: the first
half waits under its key, and what is remembered of the two is when they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from msgspec import Struct, field

from pipeline.core.texts import DIGEST_BYTES, Texts, digests
from schemas.columns import BASELINE, CANARY, CONTROL, I8, Decoded, LogitColumns
from schemas.events import ARMS

GroupKey: TypeAlias = bytes
"""Digest of the roll-out, signature, pair id (16 bytes each); without a pair id the first two."""

Moment: TypeAlias = tuple[int, int]
"""(log time in µs, bytes read through): where in the log something stands. Neither ever falls."""

_BOTH: Final = 1 << CANARY | 1 << CONTROL
_TWO_ARMS: Final = (1 << BASELINE | 1 << CANARY, 1 << BASELINE | 1 << CONTROL)
NAMED_MEMORY: Final = 2
ANONYMOUS_MEMORY: Final = 1
"""How many join timeouts a key is remembered after it came."""
_ANONYMOUS_BYTES: Final = DIGEST_BYTES + 16
_NAMED_BYTES: Final = _ANONYMOUS_BYTES + 16


class Unmet(Struct, gc=False):
    """How many of the keys that a record opened were not met by the other half of theirs."""

    n: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """The halves of one record; one entry per half."""

    columns: LogitColumns
    offset: int
    moment: Moment
    positions: I8
    """Index of each event inside its record."""
    event_us: I8
    """Completion, cut at append time + 5 s."""
    keys: list[GroupKey]
    anonymous: list[GroupKey]
    """The keys among them that have no pair id."""
    arms: list[int]
    expected: list[int]
    """Bit masks of arms."""
    generations: list[int]
    offers: list[int]
    """Bit mask of the arm, over that of the two arms of its group; 0 for a half of any other group."""
    wants: list[int]
    """What the other half of such a group offers."""
    unmet: Unmet


Arrival: TypeAlias = tuple[Halves, int]
"""One half as it came: which record, and which of its halves."""


def halves_of(decoded: Decoded[LogitColumns], offset: int, latest_us: int, moment: Moment) -> Halves:
    """A record's halves; completions are cut at `latest_us`."""
    columns = decoded.columns
    keys, anonymous = group_keys(columns)
    asks = columns.arm.astype(np.intp) << len(ARMS) | columns.expected_arms
    asks *= columns.has_pair_id
    return Halves(
        columns=columns,
        offset=offset,
        moment=moment,
        positions=decoded.positions,
        event_us=np.minimum(columns.ts_us + columns.duration_us, latest_us),
        keys=keys,
        anonymous=anonymous,
        arms=columns.arm.tolist(),
        expected=columns.expected_arms.tolist(),
        generations=columns.generation.tolist(),
        offers=_OFFERS.take(asks).tolist(),
        wants=_WANTS.take(asks).tolist(),
        unmet=Unmet(),
    )


def _pairing() -> tuple[I8, I8]:
    """What a half offers and wants, by its arm << 3 | the arms it expects; (0, 0) stands for no pair id."""
    offers, wants = np.zeros((2, len(ARMS), 1 << len(ARMS)), dtype=np.int64)
    for arm in range(len(ARMS)):
        for expected in range(1 << len(ARMS)):
            arms = 1 << arm | expected
            if arms in _TWO_ARMS:
                offers[arm, expected] = arms << len(ARMS) | 1 << arm
                wants[arm, expected] = arms << len(ARMS) | arms & ~(1 << arm)
    return offers.ravel(), wants.ravel()


_OFFERS, _WANTS = _pairing()


def group_keys(columns: LogitColumns) -> tuple[list[GroupKey], list[GroupKey]]:
    """Which group each half belongs to; and of these the ones without a pair id."""
    rollout = columns.labels["rollout"]
    rollouts = digests(Texts(rollout.values, rollout.codes.astype(np.int64)))
    parts = np.concatenate((rollouts, columns.signature, columns.pair_id), axis=1)
    keys: list[bytes] = parts.view(f"V{_NAMED_BYTES}").ravel().tolist()
    unnamed: list[int] = [] if columns.has_pair_id.all() else np.flatnonzero(~columns.has_pair_id).tolist()
    for at in unnamed:
        keys[at] = keys[at][:_ANONYMOUS_BYTES]
    return keys, [keys[at] for at in unnamed]


class Group(Struct, eq=False):
    """One key's halves while it is open, then what is remembered of it."""

    key: GroupKey
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

    def begin(self, arrival: Arrival) -> None:
        """The first half of a named group."""
        record, at = arrival
        arm = record.arms[at]
        self.expected = record.expected[at]
        self.generation = record.generations[at]
        self.present = 1 << arm
        self.halves[arm] = arrival
        self.seen[arm] = record.moment

    @property
    def is_anonymous(self) -> bool:
        """Joined by signature alone."""
        return len(self.key) == _ANONYMOUS_BYTES

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


class Matched(Struct, frozen=True, eq=False, gc=False):
    """What is remembered of two halves that expected each other alone: when they came.

    The same for all pairs of two records.
    """

    first: Moment
    first_arm: int
    last: Moment
    last_arm: int


Known: TypeAlias = Group | Matched | Arrival
"""What stands under a key; an arrival is a half that waits for the only other one of its group."""

_Came: TypeAlias = tuple[Moment, list[GroupKey], Unmet]
"""Keys that a record brought. Where it opened them and all were met, all of them came again since."""
_ANY: Final = Unmet(1)


class Groups:
    """All groups of one source partition. Bounded: by J of log time and by bytes of further records."""

    def __init__(self, join_timeout_us: int, waiting_bytes: int) -> None:
        """No group yet."""
        self._join_timeout_us = join_timeout_us
        self._waiting_bytes = waiting_bytes
        self._known: dict[GroupKey, Known] = {}
        self._opened: deque[_Came] = deque()
        """By record whose time is not up: keys whose groups it opened."""
        self._came: dict[int, deque[_Came]] = {
            _NAMED_BYTES: deque(),
            _ANONYMOUS_BYTES: deque(),
        }
        """By length of the keys: the keys that came, by record, as long as they are remembered."""
        self._open_groups = 0

    def expire(self, now: Moment) -> Iterator[tuple[Group, int]]:
        """Close the groups whose time is up at this record, oldest first, and forget what is long silent.

        Yields each with the log time of its end: its deadline, or that of the record that was too much.
        """
        known_by_key = self._known
        while self._opened and not self._within(1, self._opened[0][0], now):
            opened, keys, unmet = self._opened.popleft()
            for key in keys if unmet.n else ():
                known = known_by_key[key]
                if isinstance(known, tuple):
                    known = known_by_key[key] = _group(key, known)
                if isinstance(known, Group) and known.is_open:
                    self.close(known)
                    yield known, min(opened[0] + self._join_timeout_us, now[0])
        for length, times in ((_NAMED_BYTES, NAMED_MEMORY), (_ANONYMOUS_BYTES, ANONYMOUS_MEMORY)):
            came = self._came[length]
            while came and not self._within(times, came[0][0], now):
                moment, keys, unmet = came.popleft()
                # A key that came again since stands in another entry, too.
                for key in keys if unmet.n else ():
                    held = known_by_key.get(key)
                    if held is None:
                        continue
                    last = held[0].moment if isinstance(held, tuple) else held.last
                    if last == moment:
                        del known_by_key[key]

    def meet(self, record: Halves) -> Iterator[tuple[list[int], list[Arrival] | Group]]:
        """Note that a record's halves came. Yields, in order, those that meet something, with what they meet.

        That is, for some of them, the halves that waited for each alone; or else, for one, its key's group,
        opened if the key was not seen of late. Whoever iterates deals with each before asking for the next.
        """
        known_by_key = self._known
        moment = record.moment
        opened: list[GroupKey] = []
        again: list[GroupKey] = []
        met_at: list[int] = []
        met: list[Arrival] = []
        other: Halves | None = None
        other_arms = 0
        for at, (key, offer, wanted) in enumerate(zip(record.keys, record.offers, record.wants, strict=True)):
            known = known_by_key.get(key)
            if known is None:
                opened.append(key)
                if offer:
                    known_by_key[key] = (record, at)
                    continue
                group = known_by_key[key] = Group(key, moment, moment)
            elif isinstance(known, tuple) and known[0].offers[known[1]] == wanted:
                first, first_at = known
                if first is not other or wanted != other_arms:
                    other, other_arms = first, wanted
                    matched = Matched(first.moment, first.arms[first_at], moment, record.arms[at])
                known_by_key[key] = matched
                first.unmet.n -= 1
                again.append(key)
                met_at.append(at)
                met.append(known)
                continue
            else:
                group = known if isinstance(known, Group) else _group(key, known)
                group.last = moment
                known_by_key[key] = group
                again.append(key)
            if met:
                yield met_at, met
                self._open_groups -= len(met)
                met_at, met = [], []
            yield [at], group
        if met:
            yield met_at, met
        self._open_groups += len(opened) - len(met)
        self._note(record, opened, again)

    def _note(self, record: Halves, opened: list[GroupKey], again: list[GroupKey]) -> None:
        """Note which keys a record opened, and which it brought that were known."""
        moment = record.moment
        record.unmet.n += len(opened)
        if opened:
            self._opened.append((moment, opened, record.unmet))
        if record.anonymous:
            self._came[_ANONYMOUS_BYTES].append((moment, record.anonymous, _ANY))
            opened = [key for key in opened if len(key) == _NAMED_BYTES]
            again = [key for key in again if len(key) == _NAMED_BYTES]
        if opened:
            self._came[_NAMED_BYTES].append((moment, opened, record.unmet))
        if again:
            self._came[_NAMED_BYTES].append((moment, again, _ANY))

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

    def waiting(self) -> Iterator[Arrival]:
        """The halves of open groups."""
        for known in self._known.values():
            if isinstance(known, Group):
                yield from known.halves.values() if known.is_open else ()
            elif isinstance(known, tuple):
                yield known

    @property
    def open_groups(self) -> int:
        """Groups that halves can still join."""
        return self._open_groups

    @property
    def remembered(self) -> int:
        """Groups held, open or not."""
        return len(self._known)

    def oldest_wait_us(self, log_us: int) -> int:
        """Log time since the oldest group opened that halves can still join; 0 without any."""
        waiting = (
            log_us - moment[0]
            for moment, keys, _ in self._opened
            if any(_is_open(self._known[key]) for key in keys)
        )
        return next(waiting, 0)

    def waiting_bytes(self, bytes_read: int) -> int:
        """Bytes of records since the oldest group opened whose time is not up."""
        return bytes_read - self._opened[0][0][1] if self._opened else 0


def _group(key: GroupKey, known: Matched | Arrival) -> Group:
    """The group that stands for what was known so far."""
    if isinstance(known, Matched):
        seen: dict[object, Moment] = {known.first_arm: known.first, known.last_arm: known.last}
        return Group(key, known.first, known.last, seen=seen, is_open=False)
    record, _ = known
    group = Group(key, record.moment, record.moment)
    group.begin(known)
    return group


def _is_open(known: Known) -> bool:
    return known.is_open if isinstance(known, Group) else isinstance(known, tuple)
