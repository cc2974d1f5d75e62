"""What scoring costs per position: ours, beside plain Python, and beside the merged-bucket value alone.

Plain Python computes `kl_lower`, which gates judge, and nothing else; ours gives six numbers. The
merged-bucket value (tokens on both lists, one bucket for all else) needs none of the completion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence import Half, Matched, score_pairs
from pipeline.core.divergence.lists import TopLists
from pipeline.core.divergence.measures import MEASURES, measure
from pipeline.core.divergence.pairs import score_matched
from pipeline.workers.memory import keep_freed_memory
from schemas.columns import F8, I4, LogitColumns
from tests.bench.plain_scoring import score, score_kl_lower

K: Final = 5
ETA: Final = 1e-6
EPS: Final = 1e-3
"""Least mass of the merged bucket."""
_VOCABULARY: Final = 50_000
_ROUNDS: Final = 25
_FEW_ROUNDS: Final = 5

F4: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Workload:
    """Two arms' answers: `pairs` of `positions` top-5 lists. Rows of ids and logprobs are positions."""

    pairs: int
    positions: int
    ids: tuple[I4, I4]
    logprobs: tuple[F4, F4]

    @property
    def total(self) -> int:
        return self.pairs * self.positions


def workload(pairs: int, positions: int, *, changed: float = 0.3, seed: int = 20251129) -> Workload:
    """Seeded lists like those of a healthy canary.

    A share `changed` of the positions does not list the same tokens rank by rank: in half of them two ranks
    are swapped, in the other half the last token is another one.
    """
    rng = np.random.default_rng(seed)
    total = pairs * positions
    first = rng.beta(2.0, 0.8, total)
    rest = rng.dirichlet(np.full(K + 1, 0.6), total) * (1 - first)[:, None]
    p = np.sort(np.concatenate([first[:, None], rest[:, : K - 1]], axis=1), axis=1)[:, ::-1]
    ids = (rng.integers(0, _VOCABULARY // 6, total)[:, None] * 6 + np.arange(K)).astype(np.int32)
    logprobs = np.minimum(np.log(np.maximum(p, 1e-6)), -1e-4)
    other = logprobs + rng.normal(0, 0.05, logprobs.shape)
    other -= np.log(np.maximum(np.exp(other).sum(axis=1, keepdims=True), 1.0)) + 1e-6
    other = np.sort(other, axis=1)[:, ::-1]
    moved = rng.permutation(total)[: round(changed * total)]
    swapped, replaced = moved[: len(moved) // 2], moved[len(moved) // 2 :]
    other_ids = ids.copy()
    other_ids[swapped, K - 1], other_ids[swapped, K - 2] = ids[swapped, K - 2], ids[swapped, K - 1]
    other_ids[replaced, K - 1] = ids[replaced, 0] + K
    return Workload(
        pairs, positions, (ids, other_ids), (logprobs.astype(np.float32), other.astype(np.float32))
    )


def halves(work: Workload, arm: int) -> list[Half]:
    """One arm's answers as they come out of a record of float32 columns."""
    n, total = work.pairs, work.total

    columns = LogitColumns(
        n=n,
        signature=np.zeros((n, 16), np.uint8),
        pair_id=np.zeros((n, 16), np.uint8),
        has_pair_id=np.zeros(n, np.bool_),
        arm=np.full(n, arm, np.uint8),
        generation=np.zeros(n, np.int32),
        ts_us=np.zeros(n, np.int64),
        duration_us=np.zeros(n, np.int64),
        input_tokens=np.zeros(n, np.int32),
        cached_tokens=np.zeros(n, np.int32),
        temperature=np.zeros(n),
        top_p=np.zeros(n),
        max_tokens=np.zeros(n, np.int32),
        seed=np.zeros(n, np.int64),
        has_seed=np.zeros(n, np.bool_),
        labels={},
        expected_arms=np.zeros(n, np.uint8),
        definition=np.zeros(n, np.uint8),
        source=np.zeros(n, np.uint8),
        kind=np.zeros(n, np.uint8),
        eta=np.full(n, ETA),
        identity=np.zeros(n, np.uint8),
        ended=np.full(n, -1, np.int8),
        offsets=np.arange(n + 1, dtype=np.int64) * work.positions,
        k=np.full(n, K, np.uint8),
        entry_offsets=np.arange(n + 1, dtype=np.int64) * work.positions * K,
        # The baseline's first token in both arms: the pair agrees everywhere and is compared to its end.
        tokens=work.ids[0][:, 0].copy(),
        top_ids=work.ids[arm].reshape(total * K),
        top_logprobs=work.logprobs[arm].reshape(total * K),
    )
    return [Half(columns, i) for i in range(n)]


def merged_bucket(work: Workload) -> F8:
    """Mean merged-bucket KL per pair in plain numpy, float32, one column per position."""
    a, b = (np.ascontiguousarray(ids.T) for ids in work.ids)
    log_p, log_q = (np.ascontiguousarray(logprobs.T) for logprobs in work.logprobs)
    p, q = np.exp(log_p), np.exp(log_q)
    kl, p_listed, q_listed = (np.zeros(work.total, np.float32) for _ in range(3))
    for i in range(K):
        log_other, q_same = log_p[i].copy(), np.zeros_like(kl)
        listed = np.zeros(work.total, np.bool_)
        for j in range(K):
            same = a[i] == b[j]
            np.copyto(log_other, log_q[j], where=same)
            np.copyto(q_same, q[j], where=same)
            listed |= same
        kl += p[i] * (log_p[i] - log_other)
        p_listed += p[i] * listed
        q_listed += q_same
    p_rest, q_rest = (np.maximum(1 - listed, np.float32(EPS)) for listed in (p_listed, q_listed))
    kl += p_rest * np.log(p_rest / q_rest)
    means: F8 = kl.reshape(work.pairs, work.positions).mean(axis=1, dtype=np.float64)
    return means


def merged_in_python(ids: Sequence[Sequence[list[int]]], logprobs: Sequence[Sequence[list[float]]]) -> float:
    """Mean merged-bucket KL of one pair's positions, with a dict per position; [arm][position] → list."""
    total = 0.0
    for a, b, log_p, log_q in zip(*ids, *logprobs, strict=True):
        other = dict(zip(b, log_q, strict=True))
        p_listed = q_listed = 0.0
        for token, value in zip(a, log_p, strict=True):
            if token in other:
                p, q = math.exp(value), math.exp(other[token])
                total += p * (value - other[token])
                p_listed += p
                q_listed += q
        p_rest, q_rest = max(1 - p_listed, EPS), max(1 - q_listed, EPS)
        total += p_rest * math.log(p_rest / q_rest)
    return total / len(ids[0])


def _top_lists(work: Workload, arm: int) -> TopLists:
    logprobs = np.array(work.logprobs[arm].T, dtype=np.float64, order="C")
    ids = np.array(work.ids[arm].T, dtype=np.int64, order="C")
    return TopLists(ids, logprobs, logprobs.min(axis=0))


def _best_ns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least CPU time of one call of each, in ns. Rounds are interleaved, so that all see the same machine."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time_ns()
            call()
            best[name] = min(best[name], time.thread_time_ns() - start)
    return best


def measure_ns(pairs: int = 64, positions: int = 128, *, changed: float = 0.3) -> dict[str, float]:
    """CPU ns per position, best of several interleaved rounds; takes about a second.

    `score_pairs`: from two records' columns to scores per pair, all measures; `score_in_numpy`: the same
    where there is no compiled kernel. `measure`: the measures of positions laid out for them, numpy.
    `merged_bucket`: the merged-bucket KL alone, numpy, from the same columns
    to a mean per pair. `plain_python`: kl_lower alone, position by position; `plain_python_merged`: the
    merged-bucket KL alone; both timed on four pairs. `plain_python_all`: everything that ours says; on one.

    Raises ValueError if the two merged-bucket values disagree, if ours is below them (the least KL never
    is), or if what ours says is not what plain Python does.
    """
    work = workload(pairs, positions, changed=changed)
    matched = list(zip(halves(work, 0), halves(work, 1), strict=True))
    a, b, eta = _top_lists(work, 0), _top_lists(work, 1), np.full(work.total, ETA)
    few = min(pairs, 4)
    nested = [
        [
            [arm[i * positions : (i + 1) * positions].tolist() for arm in column]
            for column in (work.ids, work.logprobs)
        ]
        for i in range(few)
    ]

    entries = [
        [list(zip(i, v, strict=True)) for i, v in zip(ids, logprobs, strict=True)]
        for ids, logprobs in zip(*nested[0], strict=True)
    ]

    def merged_plain() -> list[float]:
        return [merged_in_python(ids, logprobs) for ids, logprobs in nested]

    def in_python() -> list[float]:
        return [score_kl_lower(ids, logprobs, ETA) for ids, logprobs in nested]

    laid_out = Matched.of(matched)
    keep_freed_memory()  # as a worker does
    merged = merged_bucket(work)
    if not np.allclose(merged[:few], merged_plain(), atol=1e-5):
        raise ValueError("the merged-bucket value in numpy and in plain Python disagree")
    # Float32 and the floor EPS can lift the yardstick a little above the exact merged-bucket value.
    if not bool((score_pairs(matched).kl_lower >= merged - 1e-3).all()):
        raise ValueError("kl_lower is below the merged-bucket value")
    scores = score_pairs(matched)
    said = [getattr(scores, name)[0] for name in (*MEASURES, "kl_lower_max")]
    same = np.allclose(scores.kl_lower[:few], in_python(), rtol=1e-9, atol=1e-9)
    if not same or not np.allclose(said, score(*entries, ETA), rtol=1e-9, atol=1e-9):
        raise ValueError("scoring and the same in plain Python disagree")
    best = _best_ns(
        {
            "score_pairs": lambda: score_pairs(matched),
            "score_in_numpy": lambda: score_matched(laid_out),
            "measure": lambda: measure(a, b, eta),
            "merged_bucket": lambda: merged_bucket(work),
            "plain_python": in_python,
            "plain_python_merged": merged_plain,
        },
        _ROUNDS,
    )
    best |= _best_ns({"plain_python_all": lambda: score(*entries, ETA)}, _FEW_ROUNDS)
    per = dict.fromkeys(best, work.total) | {"plain_python_all": positions}
    per |= dict.fromkeys(("plain_python", "plain_python_merged"), few * positions)
    return {name: best[name] / per[name] for name in best}


def main() -> None:
    """Print a table: pairs of 64 and of 128 positions; lists equal rank by rank, mostly, and never."""
    for positions in (64, 128):
        for changed in (0.0, 0.3, 1.0):
            found = measure_ns(64, positions, changed=changed)
            figures = "  ".join(f"{name} {ns:,.0f}" for name, ns in found.items())
            print(f"64 pairs of {positions:3}, {changed:4.0%} changed, ns per position: {figures}")


if __name__ == "__main__":
    main()
