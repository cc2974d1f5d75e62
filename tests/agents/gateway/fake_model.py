"""A language model of a few lines: the same prompt gives the same tokens, on every arm and in every process.

The distribution of the next token depends on the last tokens alone, so that what was generated can be scored
again. `damage` sharpens or flattens it, which is what a canary with a fault does.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from random import Random

SYLLABLES = ("ba", "do", "fi", "gu", "ha", "je", "ki", "lo", "mu", "né", "po", "ré", "si", "tu", "wö", "za")
WORDS = tuple(f" {a}{b}" for a in SYLLABLES for b in SYLLABLES)
END = 2
FIRST_WORD = 300
"""Id of WORDS[0]; ids of other text are above the words'."""
OTHER_IDS = 20_000
RANKS = 20
CONTEXT = 3
"""How many tokens back the model looks."""


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token, and the RANKS most likely ones, best first, as (id, log-probability)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def text_of(token: int) -> str:
    """What a token reads as."""
    if token == END:
        return "<|im_end|>"
    word = token - FIRST_WORD
    return WORDS[word] if 0 <= word < len(WORDS) else f" w{token}"


@lru_cache(1024)
def tokenize(text: str) -> tuple[int, ...]:
    """Ids of a text: a word that the model knows has its own, any other one by its checksum."""
    known = {word: FIRST_WORD + number for number, word in enumerate(WORDS)}
    pieces = re.findall(r"\s?\S+|\s+", text)
    return tuple(
        known.get(piece, FIRST_WORD + len(WORDS) + zlib.crc32(piece.encode()) % OTHER_IDS) for piece in pieces
    )


@lru_cache(8192)
def distribution(last: tuple[int, ...], damage: float) -> tuple[tuple[int, float], ...]:
    """The RANKS most likely next tokens and their log-probabilities; a tail of probability stays outside."""
    draw = Random(repr(last))
    ids = draw.sample(range(FIRST_WORD, FIRST_WORD + len(WORDS)), RANKS)
    slope = (0.6 + draw.random()) / (1.0 + damage)
    weights = [exp(-slope * rank) for rank in range(RANKS)]
    whole = sum(weights) / 0.97
    return tuple((token, round(log(weight / whole), 6)) for token, weight in zip(ids, weights, strict=True))


def scored(ids: Sequence[int], damage: float) -> list[Step]:
    """Every given token after the first, as the model scores it."""
    steps = []
    for place in range(1, len(ids)):
        top = distribution(tuple(ids[max(0, place - CONTEXT) : place]), damage)
        value = next((logprob for token, logprob in top if token == ids[place]), -12.5)
        steps.append(Step(ids[place], value, top))
    return steps


@lru_cache(2048)
def generated(
    prompt: tuple[int, ...],
    count: int,
    temperature: float,
    seed: int,
    damage: float,
    *,
    ignore_eos: bool = False,
) -> tuple[Step, ...]:
    """`count` tokens after the prompt, or fewer and END as the last; greedy at temperature 0."""
    own_length = 6 + sum(prompt) % 23
    draw = Random(f"{seed}/{prompt}")
    held = list(prompt[-CONTEXT:])
    steps: list[Step] = []
    while len(steps) < count:
        top = distribution(tuple(held[-CONTEXT:]), damage)
        if len(steps) == own_length and not ignore_eos:
            steps.append(Step(END, -0.0625, ((END, -0.0625), *((t, v - 3.0) for t, v in top[:-1]))))
            break
        token, logprob = top[0] if temperature == 0 else _sampled(top, temperature, draw)
        steps.append(Step(token, logprob, top))
        held.append(token)
    return tuple(steps)


def _sampled(top: tuple[tuple[int, float], ...], temperature: float, draw: Random) -> tuple[int, float]:
    weights = [exp(value / temperature) for _, value in top]
    return draw.choices(top, weights)[0]
