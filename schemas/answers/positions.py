"""What an answer holds once read: positions with their lists, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from schemas.columns import NOT_LISTED_LOGPROB

SkipReason: TypeAlias = Literal[
    "no_logprobs",
    "no_token_identity",
    "engine_error",
    "logprobs_incomplete",
    "other_choices",
    "identity_mismatch",
    "forced_mismatch",
    "definition_mismatch",
    "no_position",
    "only_in_baseline",
    "only_in_canary",
]
"""Why an answer, or a pair of answers, is not compared."""

ENOUGH_DECIMALS: Final = 6
"""More decimals change nothing: η is at its least."""


class CaptureError(ValueError):
    """A body that is none. `line` counts from 1 inside the body, 0 when it has no lines to speak of."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class Token(Struct, frozen=True, gc=False):
    """A token by what identifies it; display text never does."""

    id: int | None = None
    raw: bytes | None = None
    """Its exact bytes, where the engine gives them and they are not empty."""


class Position(Struct, frozen=True):
    """One emitted (or scored) token and its list in wire order. An empty list cannot be compared."""

    emitted: Token
    entries: tuple[tuple[Token, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`generated`: positions of the answer; `scored`: of the prompt, where the engine scored it.

    `ended`: whether the answer ended by itself, None when the body does not say.
    """

    generated: tuple[Position, ...]
    scored: tuple[Position, ...] = ()
    ended: bool | None = None
    other_choices: int = 0

    def decimals(self) -> int:
        """Most decimals seen in a log-probability, up to ENOUGH_DECIMALS."""
        most = 0
        for position in (*self.generated, *self.scored):
            for _, value in position.entries:
                if NOT_LISTED_LOGPROB < value < float("inf"):
                    exponent = Decimal(repr(value)).as_tuple().exponent
                    # Zero and whole numbers print as "0.0": one decimal, which no wire has.
                    if isinstance(exponent, int) and value != int(value):
                        most = max(most, -exponent)
            if most >= ENOUGH_DECIMALS:
                return ENOUGH_DECIMALS
        return most


def has_ids(positions: Iterable[Position]) -> bool:
    """Whether anything is listed, and everything listed has an id."""
    listed = [token for position in positions for token, _ in position.entries]
    return bool(listed) and all(token.id is not None for token in listed)


def has_bytes(positions: Iterable[Position]) -> bool:
    """Whether anything listed has bytes. A position in which one token lacks them cannot be read by bytes."""
    return any(token.raw is not None for position in positions for token, _ in position.entries)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A body that holds nothing to compare."""

    reason: SkipReason


Reading: TypeAlias = Answer | Skipped
