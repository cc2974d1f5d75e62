"""Which positions of a pair are compared, what is not scored, and that batching leaves no trace."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.divergence import Half, PairScores, score_pairs
from schemas.columns import LogitColumns
from tests.core.divergence.oracle import Entry, least_kl
from tests.core.divergence.samples import logit_columns, recorded

ETA = 1e-6
LIST_A: list[Entry] = [(1, math.log(0.6)), (2, math.log(0.2)), (3, math.log(0.1))]
LIST_B: list[Entry] = [(1, math.log(0.3)), (2, math.log(0.3)), (4, math.log(0.1))]
BAD: list[Entry] = [(1, math.log(0.6)), (1, math.log(0.2)), (3, math.log(0.1))]


def one(baseline: LogitColumns, other: LogitColumns) -> PairScores:
    return score_pairs([(Half(baseline, 0), Half(other, 0))])


def answer(tokens: list[int], lists: list[list[Entry]] | list[Entry], **options: object) -> LogitColumns:
    per_position = lists if lists and isinstance(lists[0], list) else [lists] * len(tokens)
    return logit_columns([(tokens, per_position)], **options)  # type: ignore[arg-type]


def test_free_running_up_to_and_including_the_first_difference() -> None:
    scores = one(answer([1, 2, 3, 4, 5], LIST_A), answer([1, 2, 9, 4, 5], LIST_B))
    assert scores.outcome == ("scored",)
    assert (scores.positions[0], scores.agreed[0], scores.first_difference[0]) == (3, 2, 2)


def test_free_running_without_difference_ends_with_the_shorter_answer() -> None:
    scores = one(answer([1, 2, 3], LIST_A), answer([1, 2], LIST_B))
    assert (scores.positions[0], scores.agreed[0], scores.first_difference[0]) == (2, 2, -1)


@pytest.mark.parametrize("scored", [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_forced_pairs_are_compared_everywhere(scored: list[int]) -> None:
    compared = min(4, len(scored))
    scores = one(answer([1, 2, 3, 4], LIST_A), answer(scored, LIST_B, source=1))
    assert scores.outcome == ("scored",)
    assert (scores.positions[0], scores.agreed[0], scores.first_difference[0]) == (compared, compared, -1)


@pytest.mark.parametrize(
    ("scored", "agreed"), [([9, 2, 3, 4], 0), ([1, 9, 3, 4], 1), ([1, 2, 3, 9], 3), ([1, 9], 1)]
)
def test_forced_with_other_tokens_than_the_baselines_is_not_compared(scored: list[int], agreed: int) -> None:
    """What claims to be forced and is not would be scored on other prefixes: far beyond any limit, or, if
    only the tokens that agree were kept, chosen by its agreement."""
    scores = one(answer([1, 2, 3, 4], LIST_A), answer(scored, LIST_B, source=1))
    assert scores.outcome == ("forced_mismatch",)
    assert (scores.positions[0], scores.invalid[0]) == (0, 0)
    assert scores.kl_lower[0] == scores.kl_lower_max[0] == 0
    assert (scores.agreed[0], scores.first_difference[0]) == (agreed, agreed)


def test_a_forced_mismatch_changes_nothing_of_the_pairs_beside_it() -> None:
    good, bad = answer([1, 2], LIST_B, source=1), answer([1, 9], LIST_B, source=1)
    half = Half(answer([1, 2], LIST_A), 0)
    together = score_pairs([(half, Half(good, 0)), (half, Half(bad, 0)), (half, Half(good, 0))])
    assert together.outcome == ("scored", "forced_mismatch", "scored")
    alone = score_pairs([(half, Half(good, 0))])
    assert identical(together, 0, alone, 0)
    assert identical(together, 2, alone, 0)


def test_only_the_compared_side_decides_whether_it_is_forced() -> None:
    scores = one(answer([1, 2, 3, 4], LIST_A, source=1), answer([1, 9, 3, 4], LIST_B))
    assert scores.positions[0] == 2


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        (("definition",), "definition_mismatch"),
        (("kind",), "definition_mismatch"),
        (("identity",), "identity_mismatch"),
        (("kind", "identity"), "definition_mismatch"),
        (("identity", "source"), "identity_mismatch"),
    ],
)
@pytest.mark.parametrize("token", [1, 9])
def test_other_definitions_are_not_compared(fields: tuple[str, ...], outcome: str, token: int) -> None:
    scores = one(answer([1], LIST_A), answer([token], LIST_B, **dict.fromkeys(fields, 1)))
    assert scores.outcome == (outcome,)
    assert scores.positions[0] == scores.kl_lower[0] == 0


def test_positions_that_cannot_be_read_are_skipped_and_counted() -> None:
    clean = one(answer([1, 2], LIST_A), answer([1, 2], LIST_B))
    for left, right in (([LIST_A, BAD, LIST_A], LIST_B), (LIST_A, [LIST_B, BAD, LIST_B])):
        scores = one(answer([1, 7, 2], left), answer([1, 7, 2], right))
        assert (scores.positions[0], scores.invalid[0]) == (2, 1)
        assert scores.kl_lower[0] == clean.kl_lower[0]


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_nothing_to_compare_is_no_position(tokens: list[int]) -> None:
    scores = one(answer(tokens, BAD), answer(tokens, LIST_B))
    assert scores.outcome == ("no_position",)
    assert (scores.positions[0], scores.invalid[0]) == (0, len(tokens))


def test_an_answer_that_lists_nothing_has_no_valid_position() -> None:
    nothing: list[list[Entry]] = [[], []]
    for left, right in ((nothing, LIST_A), (LIST_A, nothing), (nothing, nothing)):
        scores = one(answer([1, 2], left), answer([1, 2], right))
        assert scores.outcome == ("no_position",)
        assert (scores.positions[0], scores.invalid[0]) == (0, 2)


def test_no_pairs() -> None:
    assert score_pairs([]).n == 0


@pytest.mark.parametrize("unknown", [-9999.0, -math.inf, -1e9])
def test_unmeasured_entries_are_not_listed(unknown: float) -> None:
    with_unknown = one(
        answer([1], [*LIST_A, (4, unknown)]), answer([1], [*LIST_B, (3, unknown), (9, unknown)])
    )
    without = one(answer([1], LIST_A), answer([1], LIST_B))
    assert with_unknown.kl_lower[0] == without.kl_lower[0]
    assert with_unknown.js_lower[0] == without.js_lower[0]


def test_the_coarser_side_sets_the_resolution() -> None:
    fine, coarse = answer([1], LIST_A), answer([1], LIST_B, eta=5e-4)
    scores = one(fine, coarse)
    assert scores.kl_lower[0] == pytest.approx(least_kl(LIST_A, LIST_B, 5e-4), abs=1e-7)
    assert one(answer([1], LIST_A, eta=5e-4), answer([1], LIST_B)).kl_lower[0] == scores.kl_lower[0]


def test_mean_and_maximum_over_positions() -> None:
    scores = one(answer([1, 2], LIST_A), answer([1, 2], [LIST_A, LIST_B]))
    least = least_kl(LIST_A, LIST_B, ETA)
    assert scores.kl_lower[0] == pytest.approx(least / 2, abs=1e-7)
    assert scores.kl_lower_max[0] == pytest.approx(least, abs=1e-7)
    assert scores.top1_agree[0] == 1.0


def test_logits_are_softmaxed_over_what_is_listed_and_flagged() -> None:
    shifted_a = [(token, value + 7.5) for token, value in LIST_A]
    shifted_b = [(token, value - 3.0) for token, value in LIST_B]
    scores = one(answer([1], shifted_a, kind=1), answer([1], shifted_b, kind=1))

    def renormalised(entries: list[Entry]) -> list[Entry]:
        total = math.log(sum(math.exp(value) for _, value in entries))
        return [(token, value - total) for token, value in entries]

    assert scores.renormalised[0]
    assert scores.kl_lower[0] == pytest.approx(
        least_kl(renormalised(LIST_A), renormalised(LIST_B), ETA), abs=1e-7
    )


@pytest.mark.parametrize(
    ("ended", "other_tokens", "together"),
    [
        ((1, 1), [1, 2], 1),
        ((1, 1), [1, 9], 0),
        ((1, 1), [1, 2, 3], 0),
        ((1, 0), [1, 2], 0),
        ((0, 0), [1, 2], 0),
        ((-1, 1), [1, 2], -1),
    ],
)
def test_ended_together(ended: tuple[int, int], other_tokens: list[int], together: int) -> None:
    scores = one(answer([1, 2], LIST_A, ended=[ended[0]]), answer(other_tokens, LIST_B, ended=[ended[1]]))
    assert scores.ended_together[0] == together


RANKED: list[Entry] = [(2, math.log(0.4)), (3, math.log(0.3)), (4, math.log(0.1))]
STRAY: Entry = (9, math.log(0.001))


def test_an_emitted_token_out_of_rank_sets_no_cap_and_is_dropped_when_the_other_lacks_it() -> None:
    """First though smallest, the others falling: the list's best four say what the fifth may be at most."""
    scores = one(answer([9], [STRAY, *RANKED]), answer([9], LIST_B))
    assert scores.kl_lower[0] == pytest.approx(least_kl(RANKED, LIST_B, ETA), abs=1e-7)
    # Known-bad: taking the stray's value as the cap claims a divergence that nothing shows.
    assert least_kl([STRAY, *RANKED], LIST_B, ETA) > scores.kl_lower[0] + 0.05


def test_an_emitted_token_out_of_rank_counts_when_both_list_it() -> None:
    both = one(answer([9], [STRAY, *RANKED]), answer([9], [STRAY, *LIST_B]))
    other = (9, math.log(0.01))
    differs = one(answer([9], [STRAY, *RANKED]), answer([9], [other, *LIST_B]))
    assert both.kl_lower[0] != differs.kl_lower[0]
    # On one side out of rank, on the other in its place among the best.
    in_rank = one(answer([9], [STRAY, *RANKED]), answer([9], [*LIST_B, (9, math.log(0.09))]))
    assert in_rank.outcome == ("scored",)


@pytest.mark.parametrize("others", [1, 3])
def test_an_emitted_token_that_stands_alone_is_measured_only_where_none_can_be_more_probable(
    others: int,
) -> None:
    """As vLLM's chat lists it where one candidate is asked for: whatever its rank."""
    just_over, under = [(9, math.log(0.5) + 1e-12)], [(9, math.log(0.5) - 1e-12)]
    other = LIST_B[:others]
    for mine, theirs in ((answer([9], under), answer([9], other)), (answer([9], other), answer([9], under))):
        scores = one(mine, theirs)
        assert (scores.outcome, scores.positions[0], scores.invalid[0]) == (("no_position",), 0, 1)
    assert one(answer([9], just_over), answer([9], other)).outcome == ("scored",)
    # Another token was emitted: who lists but one lists the most probable.
    assert one(answer([2], under), answer([2], other)).outcome == ("scored",)


def test_known_bad_a_lone_token_as_the_cap_claims_a_divergence_between_equals() -> None:
    """One distribution, two draws: were each the most probable token, the arms would differ."""
    a, b = [(1, math.log(0.3))], [(2, math.log(0.01))]
    assert least_kl(a, b, ETA) > 0.7
    assert one(answer([1], a), answer([2], b)).outcome == ("no_position",)


@pytest.mark.parametrize(
    ("tokens", "entries"),
    [
        ([2], [STRAY, *RANKED]),  # another token was emitted: the list is merely not sorted
        ([9], [*RANKED, STRAY]),  # sorted, and the emitted token is last in its proper place
        ([9], [STRAY, *reversed(RANKED)]),  # ascending: no engine's out-of-rank order
    ],
)
def test_other_orders_are_unordered_sets(tokens: list[int], entries: list[Entry]) -> None:
    scores = one(answer(tokens, entries), answer(tokens, LIST_B))
    expected = one(answer(tokens, sorted(entries, key=lambda e: -e[1])), answer(tokens, LIST_B))
    assert scores.kl_lower[0] == pytest.approx(expected.kl_lower[0], abs=1e-12)
    assert scores.kl_lower[0] == pytest.approx(least_kl(entries, LIST_B, ETA), abs=1e-7)


def identical(left: PairScores, i: int, right: PairScores, j: int) -> bool:
    names = [f.name for f in fields(PairScores) if f.name != "n"]
    return all(getattr(left, name)[i] == getattr(right, name)[j] for name in names)


@pytest.mark.shared
@pytest.mark.parametrize("variant", ["same", "mismatch_x2"])
def test_same_bits_whatever_the_batch(shared_dir: Path, variant: str) -> None:
    """Alone, in any order, repeated over several blocks, beside longer lists: the same bits."""
    baseline, canary = recorded(shared_dir, variant)
    wide, _ = recorded(shared_dir, variant, k=20)
    pairs = [(Half(baseline, i), Half(canary, i)) for i in range(baseline.n)]
    alone = [score_pairs([pair]) for pair in pairs]
    rng = np.random.default_rng(3)
    for size in (2, 5, 60, 200):
        chosen = rng.integers(0, len(pairs), size)
        batch = [pairs[i] for i in chosen]
        together = score_pairs([*batch, (Half(wide, 0), Half(canary, 0))])
        for place, i in enumerate(chosen):
            assert identical(together, place, alone[i], 0), (size, place)


@pytest.mark.shared
def test_recorded_faults_stand_above_the_limit_and_healthy_canaries_below(shared_dir: Path) -> None:
    means = {}
    for variant in ("same", "fp8_cal", "mismatch_x1.25", "mismatch_x2"):
        baseline, canary = recorded(shared_dir, variant)
        scores = score_pairs([(Half(baseline, i), Half(canary, i)) for i in range(baseline.n)])
        assert set(scores.outcome) == {"scored"}
        assert (scores.positions == np.diff(baseline.offsets)).all()
        means[variant] = scores.kl_lower.mean()
    assert 0 < means["same"] < means["fp8_cal"] < 0.05 < means["mismatch_x1.25"] < means["mismatch_x2"]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_wild_columns_never_raise_and_never_make_nan(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def wild() -> LogitColumns:
        answers = []
        for _ in range(3):
            length = int(rng.integers(0, 6))
            lists = []
            for _ in range(length):
                values = rng.choice([-9999.0, -np.inf, np.nan, np.inf, 0.5, -0.1, -2.0, -800.0, 0.0], 4)
                ids = rng.integers(-1, 6, 4)
                lists.append([(int(i), float(v)) for i, v in zip(ids, values, strict=True)])
            answers.append((rng.integers(0, 2, length).tolist(), lists))
        return logit_columns(answers, kind=int(rng.integers(0, 2)), source=int(rng.integers(0, 2)))

    a, b = wild(), wild()
    scores = score_pairs([(Half(a, i), Half(b, i)) for i in range(3)])
    for name in ("kl_lower", "kl_lower_max", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree"):
        values = getattr(scores, name)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert (values[scores.positions == 0] == 0).all()
