"""Answers from chunks, one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from schemas.answers.positions import (
    Answer,
    CaptureError,
    Position,
    Reading,
    Skipped,
    Token,
    has_bytes,
    has_ids,
)
from schemas.answers.shapes import Choice, Entry, Item, Logprobs

MOST_TOKEN_ID: Final = 2**31 - 1
"""As on the wire: no vocabulary is larger."""
MOST_CHOICES: Final = 1024
_TOKEN_ID: Final = re.compile(r"token_id:(\d{1,18})")
_ENDED: Final = {"stop": True, "eos_token": True, "stop_sequence": True, "tool_calls": True, "length": False}
"""finish_reason → ended by itself; any other reason does not say."""


class AnswerBuilder:
    """Adds up chunks. Positions are kept of choice 0, or the first there is; other choices are counted."""

    def __init__(self) -> None:
        self.index: int | None = None
        """The choice that is read."""
        self.finish_reason: str | None = None
        self.positions: list[Position] = []
        self.scored: tuple[Position, ...] = ()
        self.tokens = 0
        """Of the choice that is read."""
        self.others: set[int] = set()
        self.other_tokens = 0
        self.without_logprobs = 0
        """Positions of tokens that came with their ids alone."""
        self._texts: list[str] = []
        self._keeps = True

    def keep_no_more(self) -> None:
        """Positions are let go of, what was written so far is not; tokens are counted on."""
        self._keeps = False
        self.positions = []

    @property
    def text(self) -> str:
        """What was written."""
        return "".join(self._texts)

    @property
    def ended(self) -> bool | None:
        """Whether the answer ended by itself, None while nothing says."""
        return _ENDED.get(str(self.finish_reason))

    def add(self, choice: Choice[Any], logprobs: Logprobs | None) -> None:
        """One choice of one chunk, with its log-probabilities as read. Raises CaptureError."""
        index = choice.index
        ids: Sequence[object] = choice.token_ids or ()
        listed = len(logprobs) if logprobs is not None else 0
        if index != self.index and not self._reads(index):
            self.other_tokens += max(len(ids), listed)
            return
        self.tokens += max(len(ids), listed)
        if isinstance(choice.finish_reason, str):
            self.finish_reason = choice.finish_reason
        if not self._keeps:
            return
        text = choice.written()
        if text:
            self._texts.append(text)
        if logprobs is not None and listed:
            self.positions += _positions(logprobs, ids)
        elif ids:
            self.without_logprobs += len(ids)
            self.positions += [Position(_token(None, None, None, token_id), ()) for token_id in ids]
        if choice.prompt_logprobs is not None:
            self.scored = scored_positions(choice.prompt_logprobs)

    def reading(self, usage: object) -> Reading:
        """What the chunks add up to. `usage`: the engine's, if it sent one."""
        if self.index is None or not any(p.entries for p in (*self.positions, *self.scored)):
            return Skipped("no_logprobs")
        answer = Answer(tuple(self.positions), self.scored, self.ended, len(self.others))
        if not self.others and self._lost_some(usage):
            return Skipped("logprobs_incomplete")
        if not any(has_ids(part) or has_bytes(part) for part in (answer.generated, answer.scored)):
            return Skipped("no_token_identity")
        return answer

    def _reads(self, index: int) -> bool:
        """Whether this is the choice to read from now on: the first, or a lower one."""
        if self.index is not None and index > self.index:
            if len(self.others) < MOST_CHOICES:
                self.others.add(index)
            return False
        if self.index is not None:
            self.others.add(self.index)
            self.other_tokens += self.tokens
            self.positions, self._texts, self.finish_reason = [], [], None
            self.tokens = self.without_logprobs = 0
        self.index = index
        return True

    def _lost_some(self, usage: object) -> bool:
        """Whether some are missing from the middle, so that later positions are not what they seem.

        Servers may leave out the end-of-text token and what never became text at the end. The bytes tell:
        then the tokens spell the text as far as either goes.
        """
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not self.positions or not isinstance(counted, int) or counted <= len(self.positions):
            return False
        spelled = b"".join(position.emitted.raw or b"" for position in self.positions)
        # A character cut in half comes as a lone surrogate, which plain UTF-8 cannot hold.
        written = self.text.encode(errors="surrogatepass")
        if spelled and written.startswith(spelled):
            return False
        if spelled and not spelled.startswith(written):
            return True
        # Nothing was spelled, or more than was written, as of a tool's call: the count alone tells.
        return not (self.ended and counted == len(self.positions) + 1)


def _positions(logprobs: Logprobs, token_ids: Sequence[object]) -> list[Position]:
    content = logprobs.content
    if content is not None:
        ids = token_ids if len(token_ids) == len(content) else (None,) * len(content)
        return [_chat_position(item, token_id) for item, token_id in zip(content, ids, strict=True)]
    if logprobs.tokens is not None:
        return _legacy_positions(logprobs.tokens, logprobs.top_logprobs, token_ids)
    return []


def _chat_position(item: Item, token_id: object) -> Position:
    emitted = _token(item.token, item.bytes, item.id, token_id)
    return Position(emitted, tuple([_entry(entry) for entry in item.top_logprobs or ()]))


def _entry(entry: Entry) -> tuple[Token, float]:
    value = entry.logprob
    if type(value) is not float:
        value = _number(value, "logprob")
    return _token(entry.token, entry.bytes, entry.id), value


def _legacy_positions(
    texts: list[Any], tops: list[dict[str, Any] | None] | None, token_ids: Sequence[object]
) -> list[Position]:
    """Parallel arrays. Alternatives are keyed by text, which identifies nothing, or by `token_id:N`."""
    listed = tops or [None] * len(texts)
    if len(texts) != len(listed):
        raise CaptureError(f"logprobs.tokens has {len(texts)} items, logprobs.top_logprobs {len(listed)}")
    ids = token_ids if len(token_ids) == len(texts) else (None,) * len(texts)
    return [
        Position(
            _token(text, None, None, token_id),
            tuple([(_token(key), _number(value, "top_logprobs")) for key, value in (top or {}).items()]),
        )
        for text, top, token_id in zip(texts, listed, ids, strict=True)
    ]


def scored_positions(prompt_logprobs: object) -> tuple[Position, ...]:
    """Scored prompt tokens: objects keyed by token id, the actual token first and in addition to the best k.

    The first token has none. An actual token outside the best k stays first, so that it is known to set no
    cap; every other list is put into rank order. Raises CaptureError.
    """
    if not isinstance(prompt_logprobs, list):
        return ()
    positions = []
    for place in prompt_logprobs:
        if place is None:
            continue
        try:
            entries = [
                (_identified(int(key)), _number(value["logprob"], "logprob")) for key, value in place.items()
            ]
            rank = next(iter(place.values()))["rank"]
        except (AttributeError, KeyError, TypeError, ValueError, StopIteration):
            raise CaptureError("prompt_logprobs: no object of token id → {logprob, rank}") from None
        first, others = entries[0], sorted(entries[1:], key=lambda entry: -entry[1])
        if isinstance(rank, int) and rank > len(entries):
            ordered = [first, *others] if others else []
        else:
            ordered = sorted(entries, key=lambda entry: -entry[1])
        positions.append(Position(first[0], tuple(ordered)))
    return tuple(positions)


def _token(text: object, raw: object = None, given: object = None, token_id: object = None) -> Token:
    if type(given) is int and given >= 0:
        return _identified(given, _bytes(raw))
    if type(token_id) is int and token_id >= 0:
        return _identified(token_id, _bytes(raw))
    if isinstance(text, str) and text.startswith("token_id:"):
        # Where the token string is an id, `bytes` spell that string.
        spelled = _TOKEN_ID.fullmatch(text)
        if spelled:
            return _identified(int(spelled.group(1)))
    return Token(None, _bytes(raw))


def _identified(token_id: int, raw: bytes | None = None) -> Token:
    if not 0 <= token_id <= MOST_TOKEN_ID:
        raise CaptureError(f"token id {str(token_id)[:20]}: not in 0..{MOST_TOKEN_ID}")
    return Token(token_id, raw)


def _bytes(raw: object) -> bytes | None:
    if not isinstance(raw, list) or not raw:
        return None
    try:
        return bytes(raw)
    except (TypeError, ValueError):
        raise CaptureError(f"bytes: {str(raw)[:60]} are none") from None


def _number(value: object, field: str) -> float:
    if value is None:
        return float("-inf")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CaptureError(f"{field} is {str(value)[:60]!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise CaptureError(f"{field} is beyond every number") from None
