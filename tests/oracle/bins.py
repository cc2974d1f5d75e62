"""Bins by their definition, in exact integer arithmetic: edge j is the integer nearest to
anchor · 1.15^(j/steps), kept if it is at least 1; before them stand −1 and 0."""

from __future__ import annotations

import functools

ANCHORS = {"latency": (500_000, 7), "score": (53_687_091, 8), "excess": (107_374_182, 32)}
TOPS = {"latency": 86_400_000_000, "score": 2**40, "excess": 2**40 + 107_374_182}
KINDS = {
    "ttft_us": "latency",
    "itl_us": "latency",
    "duration_us": "latency",
    "kl_lower": "score",
    "kl_floor": "score",
    "kl_renormalised": "score",
    "excess": "excess",
}


def edge(anchor: int, steps: int, j: int) -> int:
    """The integer nearest to anchor · 1.15^(j/steps); of two equally near ones the even one."""
    up, down = (23**j, 20**j) if j >= 0 else (20**-j, 23**-j)
    # (2e − 1)^steps · down < (2·anchor)^steps · up  <=>  e − ½ < the exact value
    target = (2 * anchor) ** steps * up
    e = int(anchor * 1.15 ** (j / steps))
    while e > 0 and (2 * e - 1) ** steps * down > target:
        e -= 1
    while (2 * e + 1) ** steps * down < target:
        e += 1
    if (2 * e + 1) ** steps * down == target and e % 2:
        return e + 1
    if (2 * e - 1) ** steps * down == target and e % 2:
        return e - 1
    return e


@functools.cache
def edges(kind: str) -> tuple[int, ...]:
    """All edges of a kind, ascending."""
    anchor, steps = ANCHORS[kind]
    found = {-1, 0}
    j = 0
    while (e := edge(anchor, steps, j)) >= 1:
        found.add(e)
        j -= 1
    j = 1
    while True:
        e = edge(anchor, steps, j)
        found.add(e)
        if e >= TOPS[kind]:
            return tuple(sorted(found))
        j += 1


@functools.cache
def bin_of(kind: str, value: int) -> int:
    """k such that edge[k] < value ≤ edge[k + 1]; below 0 it is bin 0, beyond the end the last bin."""
    table = edges(kind)
    low, high = 0, len(table) - 2
    while low < high:
        middle = (low + high) // 2
        if value <= table[middle + 1]:
            high = middle
        else:
            low = middle + 1
    return low
