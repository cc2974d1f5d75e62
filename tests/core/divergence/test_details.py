"""What `klaxon compare` asks beside the scores, position by position, against plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.divergence import Half, score_pairs
from pipeline.core.divergence.details import describe_pairs, perplexity_ratio
from schemas.columns import LogitColumns
from tests.core.divergence.oracle import Entry, least_kl
from tests.core.divergence.samples import logit_columns, recorded

LIMIT = 0.05
LIST_A: list[Entry] = [(1, math.log(0.6)), (2, math.log(0.2)), (3, math.log(0.1))]
LIST_B: list[Entry] = [(1, math.log(0.3)), (2, math.log(0.3)), (4, math.log(0.1))]
WHOLE: list[Entry] = [(1, math.log(0.75)), (2, math.log(0.25))]
BAD: list[Entry] = [(1, math.log(0.6)), (1, math.log(0.2)), (3, math.log(0.1))]

Answer = tuple[Sequence[int], Sequence[Sequence[Entry]]]


def pairs_of(left: Sequence[Answer], right: Sequence[Answer], **options: int) -> list[tuple[Half, Half]]:
    a, b = logit_columns(left), logit_columns(right, **options)  # type: ignore[arg-type]
    return [(Half(a, i), Half(b, i)) for i in range(len(left))]


def entropy(entries: Sequence[Entry]) -> float:
    """Over the listed tokens and one bucket for all else."""
    p = [math.exp(value) for _, value in entries]
    rest = max(1 - sum(p), 0.0)
    return -sum(x * math.log(x) for x in [*p, rest] if x > 0)


def test_every_measure_of_one_position() -> None:
    scores, details, positions = describe_pairs(pairs_of([([2], [LIST_A])], [([2], [LIST_B])]), LIMIT)
    assert positions.entropy_lower_p[0] == pytest.approx(entropy(LIST_A), abs=1e-12)
    assert positions.entropy_lower_q[0] == pytest.approx(entropy(LIST_B), abs=1e-12)
    assert positions.delta_p[0] == pytest.approx(0.3 - 0.2, abs=1e-12)
    offset = math.sqrt(scores.js_lower[0] / math.log(2))
    assert positions.behaviour_offset[0] == details.behaviour_offset[0] == pytest.approx(offset, abs=1e-12)
    assert perplexity_ratio(positions) == pytest.approx(0.2 / 0.3, rel=1e-12)
    assert details.kl_lower_p95[0] == scores.kl_lower[0] == scores.kl_lower_max[0]
    assert details.over_limit[0] == details.coverage[0] == 1.0


@pytest.mark.parametrize(("token", "common"), [(1, 1), (2, 1), (3, 0), (4, 0), (9, 0)])
def test_delta_p_only_where_both_list_the_emitted_token(token: int, common: int) -> None:
    _, details, positions = describe_pairs(pairs_of([([token], [LIST_A])], [([token], [LIST_B])]), LIMIT)
    assert details.common[0] == common
    assert (perplexity_ratio(positions) is not None) == bool(common)
    expected = math.exp(dict(LIST_B).get(token, 0)) - math.exp(dict(LIST_A).get(token, 0)) if common else 0.0
    assert details.delta_p[0] == pytest.approx(expected, abs=1e-12)


def test_the_emitted_token_is_the_baselines() -> None:
    """The last compared position of a free-running pair, where the canary emitted another."""
    _, _, positions = describe_pairs(pairs_of([([1], [LIST_A])], [([2], [LIST_B])]), LIMIT)
    assert positions.delta_p[0] == pytest.approx(0.3 - 0.6, abs=1e-12)


def test_entropy_of_a_whole_vocabulary_has_no_bucket() -> None:
    _, _, positions = describe_pairs(pairs_of([([1], [WHOLE])], [([1], [[(1, 0.0)]])]), LIMIT)
    assert positions.entropy_lower_p[0] == pytest.approx(entropy(WHOLE), abs=1e-12)
    assert positions.entropy_lower_q[0] == pytest.approx(0.0, abs=1e-12)


def test_entropy_is_never_above_that_of_the_whole_vocabulary() -> None:
    rng = np.random.default_rng(4)
    for size in (3, 10, 200):
        p = rng.dirichlet(np.full(size, 0.3))
        order = np.argsort(-p)
        truth = float(-(p[p > 0] * np.log(p[p > 0])).sum())
        previous = 0.0
        for k in (1, 2, 3):
            listed = [(int(token), math.log(p[token])) for token in order[:k]]
            _, _, positions = describe_pairs(pairs_of([([0], [listed])], [([0], [listed])]), LIMIT)
            assert previous - 1e-12 <= positions.entropy_lower_p[0] <= truth + 1e-12
            previous = positions.entropy_lower_p[0]


def test_p95_and_the_share_over_the_limit() -> None:
    far = least_kl(LIST_A, LIST_B, 1e-6)
    lists = [LIST_A] * 18 + [LIST_B] * 2
    pair = pairs_of([([1] * 20, [LIST_A] * 20)], [([1] * 20, lists)])
    for limit, share in ((far - 1e-6, 0.1), (far + 1e-6, 0.0), (0.0, 0.1)):
        _, details, _ = describe_pairs(pair, limit)
        assert details.over_limit[0] == pytest.approx(share)
    # The place 0.95 · 19 = 18.05 lies between two of the far values.
    assert details.kl_lower_p95[0] == pytest.approx(far, abs=1e-7)
    _, details, _ = describe_pairs(
        pairs_of([([1] * 20, [LIST_A] * 20)], [([1] * 20, [LIST_A] * 19 + [LIST_B])]), LIMIT
    )
    assert details.kl_lower_p95[0] == pytest.approx(0.05 * far, abs=1e-7)


def test_coverage_counts_what_could_not_be_read_and_what_is_missing() -> None:
    """An engine that drops a token's log-probabilities leaves an empty list in its place."""
    left = [([1, 2, 3, 4], [LIST_A, BAD, LIST_A, []])]
    right = [([1, 2, 3, 4], [LIST_B] * 4)]
    scores, details, positions = describe_pairs(pairs_of(left, right), LIMIT)
    assert (scores.positions[0], scores.invalid[0]) == (2, 2)
    assert details.coverage[0] == 0.5
    assert len(positions.pair) == 2


def test_pairs_that_are_not_scored_say_nothing() -> None:
    left = [([1], [BAD]), ([1], [LIST_A]), ([], [])]
    right = [([1], [LIST_B]), ([1], [LIST_B]), ([], [])]
    scores, details, positions = describe_pairs(pairs_of(left, right), LIMIT)
    assert scores.outcome == ("no_position", "scored", "no_position")
    assert details.coverage.tolist() == [0.0, 1.0, 0.0]
    assert positions.pair.tolist() == [1]
    assert describe_pairs([], LIMIT)[0].n == 0


@pytest.mark.shared
@pytest.mark.parametrize("variant", ["fp8_cal", "mismatch_x2"])
def test_against_plain_python_on_recorded_answers(shared_dir: Path, variant: str) -> None:
    """Pairs of unlike widths stand in several blocks; everything comes back in the order given."""
    baseline, canary = recorded(shared_dir, variant)
    wide, _ = recorded(shared_dir, variant, k=20)
    pairs = [(Half(baseline if i % 2 else wide, i), Half(canary, i)) for i in range(baseline.n)]
    scores, details, positions = describe_pairs(pairs, LIMIT)
    plain = score_pairs(pairs)
    assert np.allclose(plain.kl_lower, scores.kl_lower, rtol=1e-10, atol=1e-12)
    for i, (left, right) in enumerate(pairs):
        p, q = (lists_of(half.columns, half.index) for half in (left, right))
        emitted = tokens_of(left.columns, left.index)
        here = positions.pair == i
        assert positions.entropy_lower_p[here] == pytest.approx([entropy(entries) for entries in p], abs=1e-9)
        assert positions.entropy_lower_q[here] == pytest.approx([entropy(entries) for entries in q], abs=1e-9)
        changes = [
            math.exp(dict(b)[token]) - math.exp(dict(a)[token])
            for a, b, token in zip(p, q, emitted, strict=True)
            if token in dict(a) and token in dict(b)
        ]
        assert details.common[i] == len(changes)
        assert positions.delta_p[here & positions.common] == pytest.approx(changes, abs=1e-9)
        assert details.delta_p[i] == pytest.approx(np.mean(changes), abs=1e-9)
        kl = positions.kl_lower[here]
        assert kl.mean() == pytest.approx(scores.kl_lower[i], rel=1e-12)
        assert kl.max() == scores.kl_lower_max[i]
        assert details.kl_lower_p95[i] == np.quantile(kl, 0.95)
        assert details.over_limit[i] == (kl > LIMIT).mean()


def lists_of(columns: LogitColumns, index: int) -> list[list[Entry]]:
    k, first = int(columns.k[index]), int(columns.entry_offsets[index])
    length = int(columns.offsets[index + 1] - columns.offsets[index])
    ids = columns.top_ids[first : first + length * k].reshape(length, k).tolist()
    values = columns.top_logprobs[first : first + length * k].astype(float).reshape(length, k).tolist()
    return [list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]


def tokens_of(columns: LogitColumns, index: int) -> list[int]:
    tokens: list[int] = columns.tokens[columns.offsets[index] : columns.offsets[index + 1]].tolist()
    return tokens
