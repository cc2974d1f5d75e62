"""Scores of two answers, position by position in scalar arithmetic, from decisions.md §1–§3.

The least KL is found by its optimality condition: entries below their cap share one ratio with the rest of
the vocabulary. The two ratios are found by bisection.
"""

from __future__ import annotations

import ast
import functools
import math
import struct
from typing import Any

ETAS = {"f16": 5e-4, "f32": 1e-6, "f64": 1e-6}
UNIT = 2**30


def eta_of(event: dict[str, Any]) -> float:
    """Resolution of an event's log-probabilities."""
    precision = event.get("precision", 4)
    if isinstance(precision, str):
        return ETAS[precision]
    return 1e-6 if precision >= 6 else 5e-5 if precision >= 4 else 5e-4


def readable_list(ids: list[int], values: list[float], emitted: int, logits: bool) -> dict[int, float] | None:
    """token → probability of one position, or None if it cannot be read."""
    if len(ids) != len(values) or any(math.isnan(v) or v == math.inf for v in values):
        return None
    wire = [struct.unpack("<f", struct.pack("<f", v))[0] for v in values]
    listed = {i: v for i, v in zip(ids, wire, strict=True) if v > -9999.0}
    if not listed or len(listed) != sum(v > -9999.0 for v in wire):
        return None
    if logits:
        top = max(listed.values())
        total = math.fsum(math.exp(v - top) for v in listed.values())
        return {i: math.exp(v - top) / total for i, v in listed.items()}
    found = {i: math.exp(v) for i, v in listed.items()}
    if max(listed.values()) > 1e-3 or math.fsum(found.values()) > 1 + 1e-3:
        return None
    if list(found) == [emitted] and found[emitted] < 0.5:
        return None  # it may be out of rank: nothing tells what the others hold at most
    return found


def _ratio(mass: float, cap: float, plus: float, values: list[float]) -> float:
    """The r with Σ min(cap, r·v) + r·plus = mass; ∞ where even all at their cap do not hold it."""

    def held(r: float) -> float:
        return math.fsum(min(cap, r * v) for v in values) + r * plus

    if mass <= 0:
        return 0.0
    if plus == 0 and len(values) * cap <= mass:
        return math.inf
    low, high = 0.0, 1.0
    while held(high) < mass:
        low, high = high, 2 * high
    for _ in range(300):
        middle = (low + high) / 2
        if held(middle) < mass:
            low = middle
        else:
            high = middle
    return high


def position(p: dict[int, float], q: dict[int, float], eta: float) -> dict[str, float]:
    """All measures of one position; P is the baseline."""
    only_p = [i for i in p if i not in q]
    only_q = [i for i in q if i not in p]
    c, d = min(q.values()), min(p.values())
    p_r = max(1 - math.fsum(p.values()), 0.0)
    q_r = max(1 - math.fsum(q.values()), 0.0) + eta
    p_plus = max(p_r - len(only_q) * d, 0.0)
    q_plus = max(q_r - len(only_p) * c, 0.0)
    s = _ratio(q_r, c, p_plus, [p[i] for i in only_p])
    t = _ratio(p_r, d, q_plus, [q[i] for i in only_q])
    terms = [(p[i], q[i]) for i in p if i in q]
    terms += [(p[i], min(c, s * p[i])) for i in only_p]
    terms += [(min(d, t * q[i]), q[i]) for i in only_q]
    if p_plus > 0 and (q_r - len(only_p) * c) * d <= (p_r - len(only_q) * d) * c:
        terms.append((p_plus, s * p_plus))
    elif q_plus > 0:
        terms.append((t * q_plus, q_plus))
    kl = math.fsum(a * math.log(a / b) for a, b in terms if a > 0)
    js = math.fsum(0.5 * (x * math.log(2 * x / (a + b))) for a, b in terms for x in (a, b) if x > 0)
    tv = math.fsum(abs(a - b) for a, b in terms)
    own_p, own_q = math.fsum(p.values()), math.fsum(q.values())
    floor = math.fsum(
        p[i] / own_p * math.log(max(p[i] / own_p, 1e-9) / max(q.get(i, 0.0) / own_q, 1e-9)) for i in p
    )
    squares = math.fsum(v * v for v in p.values()) * math.fsum(v * v for v in q.values())
    tops_p = {i for i in p if p[i] == max(p.values())}
    tops_q = {i for i in q if q[i] == max(q.values())}
    return {
        "kl_lower": max(0.0, kl),
        "js_lower": max(0.0, js - eta * math.log(2) / 2),
        "tv_lower": max(0.0, (tv - eta) / 2),
        "kl_floor": max(0.0, floor),
        "cosine": min(1.0, math.fsum(p[i] * q[i] for i in p if i in q) / math.sqrt(squares)),
        "top1_agree": 1.0 if tops_p & tops_q else 0.0,
    }


def score(baseline: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """{"outcome": scored | definition_mismatch | forced_mismatch | no_position, …} of two logit events.

    Scored: the mean of each measure over the compared positions in units of 2⁻³⁰, `positions`, `logits`.
    """
    return dict(_score(_answer(baseline), _answer(other)))


def _answer(event: dict[str, Any]) -> str:
    """What of an event its scores depend on, as text."""
    names = ("kind", "definition", "source", "precision", "tokens", "top_ids", "top_logprobs")
    return repr({name: event[name] for name in names if name in event})


@functools.cache
def _score(baseline_text: str, other_text: str) -> dict[str, Any]:
    baseline, other = ast.literal_eval(baseline_text), ast.literal_eval(other_text)
    kind = baseline.get("kind", "logprobs")
    if baseline["definition"] != other["definition"] or kind != other.get("kind", "logprobs"):
        return {"outcome": "definition_mismatch"}
    compared = min(len(baseline["tokens"]), len(other["tokens"]))
    if other["source"] == "forced" and baseline["tokens"][:compared] != other["tokens"][:compared]:
        return {"outcome": "forced_mismatch"}
    eta = max(eta_of(baseline), eta_of(other))
    found: list[dict[str, float]] = []
    agreed = 0
    for at in range(compared):
        p, q = (
            readable_list(one["top_ids"][at], one["top_logprobs"][at], one["tokens"][at], kind == "logits")
            for one in (baseline, other)
        )
        if p is not None and q is not None:
            found.append(position(p, q, eta))
        if baseline["tokens"][at] == other["tokens"][at]:
            agreed += 1
        else:
            break
    if not found:
        return {"outcome": "no_position"}
    result: dict[str, Any] = {
        name: round(math.fsum(each[name] for each in found) / len(found) * UNIT) for name in found[0]
    }
    result["kl_lower_max"] = round(max(each["kl_lower"] for each in found) * UNIT)
    return {"outcome": "scored", "positions": len(found), "logits": kind == "logits", **result}
