"""What scoring says of a pair, position by position, as plain Python computes it: all, or kl_lower alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Final, TypeAlias, TypeVar

Entries = Sequence[tuple[int, float]]
T = TypeVar("T")
Lists: TypeAlias = Sequence[Sequence[T]]

FLOOR: Final = 1e-9
LOG_2: Final = math.log(2.0)


def score(p_lists: Sequence[Entries], q_lists: Sequence[Entries], eta: float) -> tuple[float, ...]:
    """Means of kl_lower, js_lower, tv_lower, kl_floor, cosine and top1_agree; and the largest kl_lower."""
    sums, most = [0.0] * 6, 0.0
    for a, b in zip(p_lists, q_lists, strict=True):
        found = measure(a, b, eta)
        most = max(most, found[0])
        for at, value in enumerate(found):
            sums[at] += value
    return (*(total / len(p_lists) for total in sums), most)


def measure(a: Entries, b: Entries, eta: float) -> tuple[float, float, float, float, float, float]:
    """Of one position, by the closed form of decisions.md §2."""
    log_p, log_q = dict(a), dict(b)
    p = {token: math.exp(value) for token, value in a}
    q = {token: math.exp(value) for token, value in b}
    p_sum, q_sum = sum(p.values()), sum(q.values())
    only_p = [token for token in p if token not in q]
    only_q = [token for token in q if token not in p]
    kl = js = tv = floor = common = 0.0
    for token in p:
        if token in q:
            ratio = log_p[token] - log_q[token]
            kl += p[token] * ratio
            js += _js(p[token], q[token])
            tv += abs(p[token] - q[token])
            common += p[token] * q[token]
        own = p[token] / p_sum
        floor += own * math.log(max(own, FLOOR) / max(q.get(token, 0.0) / q_sum, FLOOR))
    d, c = min(p.values()), min(q.values())
    p_rest, q_rest = max(1 - p_sum, 0.0), max(1 - q_sum, 0.0) + eta
    if only_p or only_q:
        p_after, q_after = p_rest - len(only_q) * d, q_rest - len(only_p) * c
        p_plus, q_plus = max(p_after, 0.0), max(q_after, 0.0)
        s = _largest_ratio(q_rest, c, p_plus, sorted(p[token] for token in only_p))
        t = _largest_ratio(p_rest, d, q_plus, sorted(q[token] for token in only_q))
        filled = [(p[token], min(c, s * p[token])) for token in only_p]
        filled += [(min(d, t * q[token]), q[token]) for token in only_q]
        if p_plus > 0 and q_after * d <= p_after * c:
            filled.append((p_plus, s * p_plus))
        else:
            filled.append((t * q_plus, q_plus))
    else:
        filled = [(p_rest, q_rest)]
    for x, y in filled:
        kl += x * math.log(x / y) if x > 0 and y > 0 else 0.0
        js += _js(x, y)
        tv += abs(x - y)
    squares = sum(x * x for x in p.values()) * sum(x * x for x in q.values())
    return (
        max(kl, 0.0),
        max(js - eta * LOG_2 / 2, 0.0),
        max((tv - eta) / 2, 0.0),
        max(floor, 0.0),
        common / math.sqrt(squares),
        float(max(log_p, key=log_p.__getitem__) == max(log_q, key=log_q.__getitem__)),
    )


def score_kl_lower(ids: Sequence[Lists[int]], logprobs: Sequence[Lists[float]], eta: float) -> float:
    """Mean of kl_lower alone, from the lists of two events, [arm][position]; no work for other measures."""
    return sum(map(kl_lower, *ids, *logprobs, repeat(eta))) / len(ids[0])


def kl_lower(
    a: Sequence[int], b: Sequence[int], log_p: Sequence[float], log_q: Sequence[float], eta: float
) -> float:
    """Of one position, by the closed form of decisions.md §2."""
    p, q = [math.exp(value) for value in log_p], [math.exp(value) for value in log_q]
    p_rest, q_rest = max(1 - sum(p), 0.0), max(1 - sum(q), 0.0) + eta
    other = dict(zip(b, log_q, strict=True))
    kl = 0.0
    only_p: list[float] = []
    for token, value, log_value in zip(a, p, log_p, strict=True):
        if token in other:
            kl += value * (log_value - other.pop(token))
        else:
            only_p.append(value)
    if not only_p and not other:
        return max(kl + (p_rest * math.log(p_rest / q_rest) if p_rest > 0 else 0.0), 0.0)
    only_q = sorted(value for token, value in zip(b, q, strict=True) if token in other)
    only_p.sort()
    d, c = min(p), min(q)
    p_after, q_after = p_rest - len(only_q) * d, q_rest - len(only_p) * c
    p_plus, q_plus = max(p_after, 0.0), max(q_after, 0.0)
    s = _largest_ratio(q_rest, c, p_plus, only_p)
    t = _largest_ratio(p_rest, d, q_plus, only_q)
    for x in only_p:
        kl += x * math.log(x / min(c, s * x))
    for y in only_q:
        x = min(d, t * y)
        kl += x * math.log(x / y) if x > 0 else 0.0
    x, y = (p_plus, s * p_plus) if p_plus > 0 and q_after * d <= p_after * c else (t * q_plus, q_plus)
    return max(kl + (x * math.log(x / y) if x > 0 else 0.0), 0.0)


def _js(x: float, y: float) -> float:
    mean = (x + y) / 2
    return ((x * math.log(x / mean) if x > 0 else 0.0) + (y * math.log(y / mean) if y > 0 else 0.0)) / 2


def _largest_ratio(rest: float, cap: float, plus: float, ascending: Sequence[float]) -> float:
    """max over j of (rest − j·cap) / (plus + sum of the (count − j) smallest), at least 0."""
    best, partial, j = 0.0, plus, len(ascending)
    for value in (0.0, *ascending):
        partial += value
        left = rest - j * cap
        if partial > 0:
            best = max(best, left / partial)
        elif left > 0:
            return math.inf
        j -= 1
    return best
