"""The least KL of two lists by search, in plain Python: shares no formula with the code under test.

For a given rest of P the tokens only Q lists are filled as flat as their cap allows relative to q; likewise
Q's rest. What remains is a convex function of the two rests, minimised by nested golden sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Entry = tuple[int, float]
_GOLDEN = (math.sqrt(5) - 1) / 2


def _fill(shape: Sequence[float], cap: float, total: float) -> list[float]:
    """Values min(cap, scale · shape) that sum to `total` ≤ cap · len(shape), by bisection of the scale."""
    low, high = 0.0, 1.0
    while sum(min(cap, high * x) for x in shape) < total and high < 1e300:
        high *= 4
    for _ in range(80):
        middle = (low + high) / 2
        if sum(min(cap, middle * x) for x in shape) < total:
            low = middle
        else:
            high = middle
    return [min(cap, high * x) for x in shape]


def _golden(f: Callable[[float], float], low: float, high: float) -> float:
    """Least value of a convex function on [low, high]."""
    best = min(f(low), f(high))
    a, b = low, high
    c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    fc, fd = f(c), f(d)
    for _ in range(50):
        if fc < fd:
            b, d, fd = d, c, fc
            c = b - _GOLDEN * (b - a)
            fc = f(c)
        else:
            a, c, fc = c, d, fd
            d = a + _GOLDEN * (b - a)
            fd = f(d)
    return min(best, fc, fd)


def _term(p: float, q: float) -> float:
    if p <= 0.0:
        return 0.0
    return math.inf if q <= 0.0 else p * math.log(p / q)


def least_kl(a: Sequence[Entry], b: Sequence[Entry], eta: float) -> float:
    """The least KL(P‖Q) over all completions of the lists `a` and `b`, at least 0."""
    p, q = {t: math.exp(x) for t, x in a}, {t: math.exp(x) for t, x in b}
    d, c = min(p.values()), min(q.values())
    only_p, only_q = [p[t] for t in p if t not in q], [q[t] for t in q if t not in p]
    fixed = sum(_term(p[t], q[t]) for t in p if t in q)
    p_r = max(1 - sum(p.values()), 0.0)
    q_r = max(1 - sum(q.values()), 0.0) + eta

    def for_rests(p_rest: float, from_n: float) -> float:
        def with_q_rest(q_rest: float) -> float:
            filled = _fill(only_p, c, q_r - q_rest)
            return sum(map(_term, only_p, filled)) + _term(p_rest, q_rest)

        if not only_p:
            return from_n + _term(p_rest, q_r)
        return from_n + _golden(with_q_rest, max(q_r - c * len(only_p), 0.0), q_r)

    def with_p_rest(p_rest: float) -> float:
        filled = _fill(only_q, d, p_r - p_rest)
        return for_rests(p_rest, sum(map(_term, filled, only_q)))

    if not only_q:
        return max(fixed + for_rests(p_r, 0.0), 0.0)
    return max(fixed + _golden(with_p_rest, max(p_r - d * len(only_q), 0.0), p_r), 0.0)


def greedy_kl(a: Sequence[Entry], b: Sequence[Entry], eta: float) -> float:
    """Known-bad: fills the caps "largest first" and calls the result a lower bound."""
    p, q = {t: math.exp(x) for t, x in a}, {t: math.exp(x) for t, x in b}
    d, c = min(p.values()), min(q.values())
    total = sum(_term(p[t], q[t]) for t in p if t in q)
    p_left = max(1 - sum(p.values()), 0.0)
    q_left = max(1 - sum(q.values()), 0.0) + eta
    for value in sorted((q[t] for t in q if t not in p), reverse=True):
        taken = min(d, p_left)
        p_left -= taken
        total += _term(taken, value)
    for value in sorted((p[t] for t in p if t not in q), reverse=True):
        taken = min(c, q_left)
        q_left -= taken
        total += _term(value, max(taken, 1e-300))
    return max(total + _term(p_left, max(q_left, 1e-300)), 0.0)
