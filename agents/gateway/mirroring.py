"""Which requests are mirrored, and to which arms. Pure.

A request is mirrored whole or not at all: what is compared is one question's answers by baseline and canary,
and beside them the control's, whose distance to the baseline is the noise that the canary's is held against
(X3). A control without a canary, or either without a baseline, is compared with nothing and gets no copy.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agents.gateway.settings import MirrorSettings
from schemas.events import ARMS, Arm

MINUTE_US: Final = 60_000_000
SIGNATURES_MOST: Final = 65_536
"""Signatures remembered; of more in one minute the oldest is forgotten, and the cap of that one with it."""
USED_MOST: Final = 1 << 21
"""Tokens that one copy is believed to have used: an engine that counts wrongly must not end mirroring."""
_SECOND_US: Final = 1_000_000
_WHOLE: Final = 1 << 64
_COMPARED: Final = frozenset({"baseline", "canary"})


class Reason(StrEnum):
    """Why a request is not mirrored."""

    PATH = "path"
    """Requests of this path are not."""
    NOT_SAMPLED = "not_sampled"
    NO_PAIR = "no_pair"
    """Baseline and canary cannot both answer it: no directive, no pool, no node, or a class left out; or no
    answer to it could be compared, as asked."""
    SIGNATURE_CAP = "signature_cap"
    """Enough requests equal to it were, in the last minute."""
    BUDGET = "budget"
    """The copies before it have spent the tokens."""


@dataclass(frozen=True, slots=True)
class NotMirrored:
    """No copy is made."""

    reason: Reason


class Mirroring:
    """Decides before the primary is asked. Times are monotonic; one that goes back counts as the newest.

    Bounded: a counter per reason, and 65,536 signatures with the times of at most
    `per_signature_per_minute` requests each, which expire after a minute.
    """

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        self._sampled_below = min(round(settings.rate * _WHOLE), _WHOLE)
        self._budget = _Budget(settings.tokens_per_s)
        self._recent = _Recent(settings.per_signature_per_minute)
        self._now_us = 0
        self._mirrored = 0
        self._reasons: Counter[Reason] = Counter()

    def sampled(self, pair_id: str) -> bool:
        """Whether this request is among the share that is mirrored: the same on every gateway."""
        digest = hashlib.sha256(b"klaxon/mirror\0" + pair_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self._sampled_below

    def decide(
        self,
        pair_id: str,
        signature: str,
        path: str,
        arm: Arm,
        possible: Collection[Arm],
        expected_tokens: int,
        mono_us: int,
    ) -> tuple[Arm, ...] | NotMirrored:
        """The arms that get a copy, in the order of ARMS.

        `arm` answers the user; `possible`: the others that could be sent copies (Routing.shadows).
        `expected_tokens`: of one copy. That many for each arm returned are promised: settle them, sent or
        not.
        """
        self._now_us = max(self._now_us, mono_us)
        copies = tuple(one for one in ARMS if one != arm and one in possible and one in self._settings.arms)
        reason = self._reason(pair_id, signature, path, {arm, *copies}, max(expected_tokens, 0) * len(copies))
        if reason is not None:
            self._reasons[reason] += 1
            return NotMirrored(reason)
        self._mirrored += 1
        return copies

    def settle(self, promised_tokens: int, used_tokens: int) -> None:
        """A copy is done, or was never sent: it used so many of the tokens promised for it."""
        self._budget.take(min(max(used_tokens, 0), USED_MOST) - promised_tokens)

    def gauges(self) -> dict[str, int]:
        """Requests mirrored, and not by reason, since the start; tokens left (below 0: owed); signatures."""
        return {
            "mirrored": self._mirrored,
            **{f"not_mirrored_{reason}": self._reasons[reason] for reason in Reason},
            "mirror_tokens_left": self._budget.tokens,
            "mirror_signatures": len(self._recent),
            "mirror_signatures_forgotten": self._recent.forgotten,
        }

    def _reason(
        self, pair_id: str, signature: str, path: str, arms: Collection[Arm], tokens: int
    ) -> Reason | None:
        if not self._settings.paths.of(path):
            return Reason.PATH
        if not self.sampled(pair_id):
            return Reason.NOT_SAMPLED
        if not _COMPARED.issubset(arms):
            return Reason.NO_PAIR
        self._budget.refill(self._now_us)
        if self._recent.is_full(signature, self._now_us):
            return Reason.SIGNATURE_CAP
        if not self._budget.is_open:
            return Reason.BUDGET
        self._budget.take(tokens)
        self._recent.add(signature, self._now_us)
        return None


class _Budget:
    """Tokens per second, a second's worth at once. Exact: counted in tokens × µs.

    Whoever comes while any are left is let in, however much it takes, and nobody until a debt is paid: a
    request of more than a second's tokens would else never be, and the sample would lean to short ones.
    """

    def __init__(self, tokens_per_s: int) -> None:
        self._per_us = tokens_per_s
        self._full = tokens_per_s * _SECOND_US
        self._left = self._full
        self._at_us: int | None = None

    @property
    def is_open(self) -> bool:
        return self._left > 0

    @property
    def tokens(self) -> int:
        return self._left // _SECOND_US

    def refill(self, now_us: int) -> None:
        if self._at_us is not None:
            self._left = min(self._full, self._left + (now_us - self._at_us) * self._per_us)
        self._at_us = now_us

    def take(self, tokens: int) -> None:
        self._left = min(self._full, self._left - tokens * _SECOND_US)


class _Recent:
    """When requests of each signature were mirrored in the last minute, those mirrored last at the end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: OrderedDict[str, deque[int]] = OrderedDict()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._times)

    def is_full(self, signature: str, now_us: int) -> bool:
        """Whether it was mirrored as often as it may be. Forgets what is older than a minute."""
        while self._times:
            oldest, times = next(iter(self._times.items()))
            if now_us - times[-1] < MINUTE_US:
                break
            del self._times[oldest]
        times = self._times.get(signature, deque())
        while times and now_us - times[0] >= MINUTE_US:
            times.popleft()
        return len(times) >= self._most

    def add(self, signature: str, now_us: int) -> None:
        self._times.setdefault(signature, deque()).append(now_us)
        self._times.move_to_end(signature)
        if len(self._times) > SIGNATURES_MOST:
            self._times.popitem(last=False)
            self.forgotten += 1
