"""`kl_lower` never claims more than there is: at every real position, at every precision of the wire, and
over whole vocabularies made of real lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.divergence.lists import TopLists
from pipeline.core.divergence.measures import Measures, measure
from schemas.columns import F8, I8
from tests.core.divergence.oracle import greedy_kl

STORED = 3e-5
"""How good the stored true divergence is itself."""
FINE = 1e-6


@pytest.fixture(scope="module")
def logits(shared_dir: Path) -> Path:
    return shared_dir / "data" / "logits"


def variants(folder: Path) -> list[tuple[str, str]]:
    """Every teacher-forced variant there is: (answers, name)."""
    names = [path.name.removesuffix(".npz").split(".", 2) for path in sorted(folder.glob("tf.*.npz"))]
    return [(answers, name) for _, answers, name in names]


def as_lists(ids: np.ndarray, logprobs: np.ndarray) -> TopLists:
    values = np.array(logprobs.T, dtype=np.float64, order="C")
    return TopLists(np.array(ids.T, dtype=np.int64, order="C"), values, values.min(axis=0))


def four_decimals(logprobs: np.ndarray) -> np.ndarray:
    return np.round(logprobs.astype(np.float64), 4)


def float16(logprobs: np.ndarray) -> np.ndarray:
    return logprobs.astype(np.float16)


def as_sent(logprobs: np.ndarray) -> np.ndarray:
    return logprobs


WIRES = {"float32": (as_sent, FINE), "4 decimals": (four_decimals, 5e-5), "float16": (float16, 5e-4)}


def allowance(kl_lower: F8, eta: float) -> F8:
    """How far entries rounded by at most η may lift `kl_lower` (decisions.md §2)."""
    return eta * (2 + kl_lower + math.log(1 / eta)) + STORED


@pytest.mark.shared
def test_all_variants_are_looked_at(logits: Path) -> None:
    assert len(variants(logits)) == 9


@pytest.mark.shared
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("k", [(1, 1), (2, 5), (5, 2), (5, 5), (20, 1), (20, 5)])
def test_every_position_of_every_variant(logits: Path, wire: str, k: tuple[int, int]) -> None:
    read, eta = WIRES[wire]
    for answers, name in variants(logits):
        base, canary = np.load(logits / f"base.{answers}.npz"), np.load(logits / f"tf.{answers}.{name}.npz")
        found = measure(
            as_lists(base["top_ids"][:, : k[0]], read(base["top_lp"][:, : k[0]])),
            as_lists(canary["top_ids"][:, : k[1]], read(canary["top_lp"][:, : k[1]])),
            np.full(len(base["tok"]), eta),
        )
        truth = canary["kl_true"]
        over = found.kl_lower > truth + allowance(found.kl_lower, eta)
        assert not over.any(), (answers, name, np.flatnonzero(over)[:3])
        assert (found.kl_lower >= 0.0).all()
        # The true divergence bounds the other two: TV ≤ sqrt(KL/2) (Pinsker), JS ≤ log 2 · TV.
        room = 4 * eta + STORED
        assert (found.tv_lower <= np.sqrt((truth + STORED) / 2) + room).all(), (answers, name)
        assert (found.js_lower <= math.log(2) * np.sqrt((truth + STORED) / 2) + room).all(), (answers, name)


@pytest.mark.shared
@pytest.mark.parametrize("wire", WIRES)
def test_a_greedy_fill_is_caught_at_every_precision(logits: Path, wire: str) -> None:
    """Known-bad: the same check sees caps filled "largest first" exceed the truth."""
    read, eta = WIRES[wire]
    base, canary = np.load(logits / "base.greedy.npz"), np.load(logits / "tf.greedy.mismatch_x2.npz")
    claimed = np.array(
        [
            greedy_kl(
                list(zip(a.tolist(), p.tolist(), strict=True)),
                list(zip(b.tolist(), q.tolist(), strict=True)),
                eta,
            )
            for a, p, b, q in zip(
                base["top_ids"][:, :5],
                read(base["top_lp"][:, :5]).astype(np.float64),
                canary["top_ids"],
                read(canary["top_lp"]).astype(np.float64),
                strict=True,
            )
        ]
    )
    assert (claimed > canary["kl_true"] + allowance(claimed, eta)).sum() > 0


TAIL = 40
"""Tokens that share what no list holds."""


@pytest.fixture(scope="module")
def vocabularies(logits: Path) -> tuple[F8, F8]:
    """Whole distributions (T, V) of both sides whose best tokens are the recorded ones.

    P's twenty are recorded, Q's where the canary says something of them; the rest of either's mass lies on
    further tokens, none above the smallest that is recorded.
    """
    parts = []
    for variant in ("same", "fp8_cal", "q4_0", "temp0.7", "mismatch_x1.25", "mismatch_x2"):
        base, canary = np.load(logits / "base.greedy.npz"), np.load(logits / f"tf.greedy.{variant}.npz")
        parts.append(completed(base, canary))
    p, q = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    return p, q


def completed(base: np.lib.npyio.NpzFile, canary: np.lib.npyio.NpzFile) -> tuple[F8, F8]:
    rows = np.arange(0, len(base["tok"]), 13)
    size = 20 + 5 + TAIL
    p, q = np.zeros((len(rows), size)), np.zeros((len(rows), size))
    for at, row in enumerate(rows.tolist()):
        ids: list[int] = base["top_ids"][row].tolist()
        ids += [token for token in canary["top_ids"][row].tolist() if token not in ids]
        p[at, :20] = np.exp(base["top_lp"][row].astype(np.float64))
        known = dict(zip(base["top_ids"][row, :5].tolist(), canary["at_base5"][row].tolist(), strict=True))
        known |= dict(zip(canary["top_ids"][row].tolist(), canary["top_lp"][row].tolist(), strict=True))
        for token, value in known.items():
            q[at, ids.index(token)] = math.exp(value)
        for side in (p, q):
            smallest = side[at][side[at] > 0.0].min()
            open_places = np.flatnonzero(side[at] == 0.0)
            rest = max(1.0 - side[at].sum(), 1e-9)
            weights = np.exp(-0.2 * np.arange(len(open_places)))
            side[at, open_places] = np.minimum(rest * weights / weights.sum(), smallest)
            side[at] /= side[at].sum()
    return p, q


def truths(p: F8, q: F8) -> tuple[F8, F8, F8]:
    mean = (p + q) / 2
    kl = (p * np.log(p / q)).sum(axis=1)
    js = ((p * np.log(p / mean)).sum(axis=1) + (q * np.log(q / mean)).sum(axis=1)) / 2
    return kl, js, np.abs(p - q).sum(axis=1) / 2


def best(values: F8, k: int) -> TopLists:
    ids: I8 = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return as_lists(ids, np.log(np.take_along_axis(values, ids, axis=1)))


def measured(p: F8, q: F8, k_p: int, k_q: int, eta: float = FINE) -> Measures:
    return measure(best(p, k_p), best(q, k_q), np.full(len(p), eta))


@pytest.mark.shared
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=25, deadline=None)
def test_whole_vocabularies_of_real_lists(
    vocabularies: tuple[F8, F8], k_p: int, k_q: int, more_p: int, more_q: int
) -> None:
    """All three stay below the truth, and never decrease when either list grows."""
    p, q = vocabularies
    short, long = measured(p, q, k_p, k_q), measured(p, q, k_p + more_p, k_q + more_q)
    for name, truth in zip(("kl_lower", "js_lower", "tv_lower"), truths(p, q), strict=True):
        less, more = getattr(short, name), getattr(long, name)
        assert (less >= 0.0).all(), name
        assert (less <= more + 1e-9).all(), name
        assert (more <= truth + 1e-9).all(), name


@pytest.mark.shared
def test_whole_lists_tell_the_truth(vocabularies: tuple[F8, F8]) -> None:
    p, q = vocabularies
    found = measured(p, q, p.shape[1], p.shape[1], 0.0)
    for name, truth in zip(("kl_lower", "js_lower", "tv_lower"), truths(p, q), strict=True):
        np.testing.assert_allclose(getattr(found, name), truth, atol=1e-9, err_msg=name)


@pytest.mark.shared
def test_equal_lists_differ_in_nothing_and_their_order_in_less(vocabularies: tuple[F8, F8]) -> None:
    p, q = vocabularies
    a, b = best(p, 8), best(q, 8)
    eta = np.full(len(p), FINE)
    same = measure(a, a, eta)
    assert not any(getattr(same, name).any() for name in ("kl_lower", "js_lower", "tv_lower", "kl_floor"))
    order: Sequence[int] = np.random.default_rng(1).permutation(8).tolist()
    turned = TopLists(b.ids[order], b.logprobs[order], b.cap)
    for name in ("kl_lower", "js_lower", "tv_lower", "kl_floor", "cosine", "top1_agree"):
        first, second = getattr(measure(a, b, eta), name), getattr(measure(a, turned, eta), name)
        # Another order rounds 1 − Σq otherwise, by 1e-16 of as little as η.
        np.testing.assert_allclose(first, second, atol=1e-9, rtol=1e-9, err_msg=name)


@pytest.mark.shared
def test_large_where_the_sure_token_is_missing(vocabularies: tuple[F8, F8]) -> None:
    p, q = vocabularies
    sure = p.max(axis=1) > 0.9
    missing = sure & ~(best(q, 5).ids == p.argmax(axis=1)).any(axis=0)
    assert missing.sum() >= 3
    assert (measured(p, q, 5, 5).kl_lower[missing] > 0.5).all()
