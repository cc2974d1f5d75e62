"""Lists of an answer read all at once, held against the same read one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.lists import Key, Told, careful_row, plain_rows, rows_of
from schemas.answers.positions import Position
from tests.agents.gateway.exchanges import position

EDGES = (
    0.0,
    1e-3,
    1.1e-3,
    -0.6931,
    -0.69,
    -0.5,
    -1.2,
    -9999.0,
    -9998.995,
    math.nan,
    math.inf,
    -math.inf,
    1e39,
)
values = st.one_of(st.floats(-30, -0.7), st.floats(-3, -0.7).map(lambda value: round(value, 1)))
edges = st.one_of(values, st.sampled_from(EDGES))


def answers(value: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[Position, ...]]:
    """Lists of one length, tokens often the same and often twice."""

    def of(width: int) -> st.SearchStrategy[tuple[Position, ...]]:
        entries = st.lists(st.tuples(st.integers(0, 8), value), min_size=width, max_size=width)
        one = st.builds(lambda emitted, listed: position(emitted, *listed), st.integers(0, 8), entries)
        return st.lists(one, min_size=1, max_size=5).map(tuple)

    return st.integers(1, 7).flatmap(of)


def keys_of(positions: Sequence[Position]) -> tuple[list[Key | None], list[Key | None]]:
    return [p.emitted.id for p in positions], [token.id for p in positions for token, _ in p.entries]


def one_by_one(positions: Sequence[Position], told: Told) -> list[list[tuple[Key, float]]]:
    return [list(careful_row(p, p.emitted.id, [token.id for token, _ in p.entries], told)) for p in positions]


@given(st.one_of(answers(values), answers(edges)), st.integers(1, 7), st.booleans())
def test_all_at_once_is_one_by_one(positions: tuple[Position, ...], top: int, normalised: bool) -> None:
    told = Told(top, 0, normalised)
    expected = one_by_one(positions, told)
    found = plain_rows(positions, *keys_of(positions), told)
    if found is not None:
        assert [list(zip(*row, strict=True)) for row in zip(*found, strict=True)] == expected
    whole = rows_of(positions, *keys_of(positions), told)
    if whole is None:
        assert not any(expected)
    else:
        assert [list(zip(*row, strict=True)) for row in zip(*whole, strict=True)] == expected


@given(st.integers(1, 7))
def test_plain_lists_are_read_at_once(width: int) -> None:
    """Else nothing above was compared."""
    listed = [(token, -1.0 - token) for token in range(width)]
    positions = (position(0, *listed), position(width - 1, *reversed(listed)))
    assert plain_rows(positions, *keys_of(positions), Told(5, 0)) is not None
