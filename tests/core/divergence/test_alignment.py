"""Which positions stand beside each other, from one to a hundred thousand, whatever an engine leaves out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.core.captures.comparison import Captured, compare_captures
from pipeline.core.captures.halves import Stated, halves
from pipeline.core.divergence import Half, PairScores, score_pairs
from pipeline.core.divergence.details import describe_pairs
from schemas.answers.positions import Answer, Position, Skipped, Token
from schemas.columns import LogitColumns
from tests.core.divergence.oracle import Entry, least_kl
from tests.core.divergence.samples import columns_of, logit_columns

ETA = 1e-6
LIST_A: list[Entry] = [(1, math.log(0.6)), (2, math.log(0.2)), (3, math.log(0.1))]
LIST_B: list[Entry] = [(1, math.log(0.3)), (2, math.log(0.3)), (4, math.log(0.1))]
LEAST = least_kl(LIST_A, LIST_B, ETA)
STATED = (Stated(0, ETA), Stated(0, ETA))
LONG = 100_000


def long_answer(entries: list[Entry], tokens: np.ndarray, source: int = 0) -> LogitColumns:
    k = len(entries)
    ids = np.tile(np.array([token for token, _ in entries], dtype=np.int32), len(tokens))
    values = np.tile(np.array([value for _, value in entries], dtype=np.float64), len(tokens))
    codes = {"source": source}
    return columns_of(tokens, ids, values, [len(tokens)], [k], eta=ETA, codes=codes, ended=[-1])


def one(baseline: LogitColumns, other: LogitColumns) -> PairScores:
    return score_pairs([(Half(baseline, 0), Half(other, 0))])


@pytest.mark.parametrize("source", [0, 1])
def test_one_position(source: int) -> None:
    other = 7 if source else 8
    scores = one(logit_columns([([7], [LIST_A])]), logit_columns([([other], [LIST_B])], source=source))
    assert (scores.positions[0], scores.agreed[0], scores.first_difference[0]) == (1, source, -source)
    assert scores.kl_lower[0] == scores.kl_lower_max[0] == pytest.approx(LEAST, abs=1e-7)


@pytest.mark.parametrize("different_at", [None, 0, 81_919, 99_999])
def test_a_hundred_thousand_positions(different_at: int | None) -> None:
    """Longer than any block; free-running ends with the first difference, forced must have none."""
    tokens = np.ones(LONG, dtype=np.int32)
    other = tokens.copy()
    if different_at is not None:
        other[different_at] = 2
    compared = LONG if different_at is None else different_at + 1
    baseline = long_answer(LIST_A, tokens)
    for source in (0, 1) if different_at is None else (0,):
        scores, details, at = describe_pairs(
            [(Half(baseline, 0), Half(long_answer(LIST_B, other, source), 0))], 0.05
        )
        assert (scores.positions[0], scores.agreed[0]) == (compared, compared - (different_at is not None))
        assert scores.kl_lower[0] == pytest.approx(LEAST, abs=1e-7)
        assert details.kl_lower_p95[0] == pytest.approx(LEAST, abs=1e-7)
        assert len(at.pair) == compared


def test_short_and_long_pairs_stand_side_by_side() -> None:
    """One of a hundred thousand among pairs of one: each as if it stood alone."""
    tokens = np.ones(LONG, dtype=np.int32)
    long_pair = (Half(long_answer(LIST_A, tokens), 0), Half(long_answer(LIST_B, tokens), 0))
    short = logit_columns([([1], [LIST_A])] * 3), logit_columns([([1], [LIST_B])] * 3)
    short_pairs = [(Half(short[0], i), Half(short[1], i)) for i in range(3)]
    together = score_pairs([short_pairs[0], long_pair, *short_pairs[1:]])
    assert together.positions.tolist() == [1, LONG, 1, 1]
    alone = score_pairs([long_pair])
    for name in ("kl_lower", "js_lower", "tv_lower", "kl_floor", "cosine", "kl_lower_max"):
        assert getattr(together, name)[1] == getattr(alone, name)[0], name
        assert getattr(together, name)[0] == getattr(score_pairs(short_pairs), name)[0], name


@pytest.mark.parametrize("drops", ["baseline", "canary", "both"])
def test_an_engine_that_drops_some_log_probabilities(drops: str) -> None:
    """What is missing counts for nothing but coverage; the positions after it keep their places."""
    tokens = list(range(1, 11))
    missing = {2, 3, 7}
    lists_a = [[] if i in missing and drops != "canary" else LIST_A for i in range(10)]
    lists_b = [[] if i in missing and drops != "baseline" else LIST_B for i in range(10)]
    for source in (0, 1):
        scores, details, _ = describe_pairs(
            [
                (
                    Half(logit_columns([(tokens, lists_a)]), 0),
                    Half(logit_columns([(tokens, lists_b)], source=source), 0),
                )
            ],
            0.05,
        )
        assert (scores.positions[0], scores.invalid[0], scores.agreed[0]) == (7, 3, 10)
        assert details.coverage[0] == 0.7
        assert scores.kl_lower[0] == pytest.approx(LEAST, abs=1e-7)


def test_the_first_difference_may_stand_where_a_list_is_missing() -> None:
    """Tokens, not lists, say how far two answers agree."""
    left = logit_columns([([1, 2, 3, 4], [LIST_A, LIST_A, [], LIST_A])])
    right = logit_columns([([1, 2, 9, 4], [LIST_B, LIST_B, LIST_B, LIST_B])])
    scores = one(left, right)
    assert (scores.positions[0], scores.invalid[0], scores.agreed[0]) == (2, 1, 2)
    assert scores.first_difference[0] == 2


def position(emitted: Token, entries: list[tuple[Token, float]]) -> Position:
    return Position(emitted, tuple(entries))


def with_ids(tokens: list[int], entries: list[Entry]) -> Answer:
    listed = [(Token(token, None), value) for token, value in entries]
    return Answer(tuple(position(Token(token, None), listed) for token in tokens))


def with_bytes(tokens: list[int], entries: list[Entry]) -> Answer:
    listed = [(Token(None, bytes([token])), value) for token, value in entries]
    return Answer(tuple(position(Token(None, bytes([token])), listed) for token in tokens))


def with_both(tokens: list[int], entries: list[Entry]) -> Answer:
    listed = [(Token(token, bytes([token])), value) for token, value in entries]
    return Answer(tuple(position(Token(token, bytes([token])), listed) for token in tokens))


@pytest.mark.parametrize("left", [with_ids, with_bytes, with_both])
@pytest.mark.parametrize("right", [with_ids, with_bytes, with_both])
def test_joined_on_ids_else_on_bytes(left: object, right: object) -> None:
    pair = halves(left([1, 2], LIST_A), right([1, 2], LIST_B), STATED, forced=False)  # type: ignore[operator]
    if {left, right} == {with_ids, with_bytes}:
        assert pair == Skipped("identity_mismatch")
        return
    assert not isinstance(pair, Skipped)
    scores = score_pairs([pair])
    assert (scores.positions[0], scores.agreed[0]) == (2, 2)
    assert scores.kl_lower[0] == pytest.approx(LEAST, abs=1e-7)


def test_ids_that_disagree_are_believed_before_equal_bytes() -> None:
    """Two tokens may spell the same; their ids tell them apart."""
    spelled = b"x"
    left = Answer((position(Token(1, spelled), [(Token(1, spelled), -0.1)]),))
    right = Answer((position(Token(2, spelled), [(Token(2, spelled), -0.1)]),))
    pair = halves(left, right, STATED, forced=False)
    assert not isinstance(pair, Skipped)
    scores = score_pairs([pair])
    assert scores.first_difference[0] == 0
    assert scores.kl_lower[0] > 0.5


def test_equal_bytes_twice_in_a_position_make_it_invalid() -> None:
    twice = [(Token(None, b"x"), -1.0), (Token(None, b"x"), -2.0), (Token(None, b"y"), -3.0)]
    once = [(Token(None, b"x"), -0.5), (Token(None, b"y"), -2.0), (Token(None, b"z"), -3.0)]
    emitted = Token(None, b"x")
    left = Answer((position(emitted, twice), position(emitted, once)))
    right = Answer((position(emitted, once), position(emitted, once)))
    pair = halves(left, right, STATED, forced=False)
    assert not isinstance(pair, Skipped)
    scores = score_pairs([pair])
    assert (scores.positions[0], scores.invalid[0]) == (1, 1)
    assert scores.kl_lower[0] == 0.0


def test_a_comparison_says_how_much_it_could_read() -> None:
    """Coverage over all pairs is of positions, not of pairs."""
    whole = with_both([1, 2], LIST_A)
    partly = Answer((*whole.generated, position(Token(3, b"\x03"), []), position(Token(4, b"\x04"), [])))
    sides = [Captured("a", whole), Captured("b", partly)]
    result = compare_captures(sides, sides, 0.05, "auto").result
    assert (result["positions"], result["coverage"]) == (4, 4 / 6)
    assert [row["coverage"] for row in result["per_pair"]] == [1.0, 0.5]
    assert compare_captures([], [], 0.05, "auto").result["coverage"] is None
