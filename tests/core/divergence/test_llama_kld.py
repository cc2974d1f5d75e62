"""llama.cpp's seven statistics against exact fractions and plain sums over whole vocabularies."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from pipeline.core.divergence.llama_kld import (
    QUANTILES,
    KldStatistics,
    kld_of,
    kld_statistics,
    stored,
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def two_models(positions: int, vocabulary: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of both, and the actual next tokens."""
    rng = np.random.default_rng(seed)
    p = rng.normal(0, 4, (positions, vocabulary))
    q = p + rng.normal(0, 0.5, p.shape)
    return p, q, rng.integers(0, vocabulary, positions)


def exact(values: list[float]) -> list[Fraction]:
    return [Fraction(value) for value in values]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """As the reference states it: S1/n, sqrt((S2/n − m²)/(n − 1)), in exact arithmetic."""
    n, x = len(values), exact(values)
    mean = sum(x) / n
    spread = (sum(v * v for v in x) / n - mean * mean) / (n - 1) if n > 10 else Fraction(0)
    return float(mean), math.sqrt(spread)


def quantile(values: list[float], share: float) -> float:
    x = sorted(exact(values))
    at = Fraction(share) * (len(x) - 1)
    low = math.floor(at)
    high = min(low + 1, len(x) - 1)
    return float(x[low] + (at - low) * (x[high] - x[low]))


def reference(kld: list[float], same: list[int], log_p: list[float], log_q: list[float]) -> dict[str, object]:
    delta = [math.exp(q) - math.exp(p) for p, q in zip(log_p, log_q, strict=True)]
    squares = [x * x for x in delta]
    rms = math.sqrt(sum(exact(squares)) / len(squares))
    n = len(log_p)
    nll_p, nll_q = exact([-x for x in log_p]), exact([-x for x in log_q])
    m_p, m_q = sum(nll_p) / n, sum(nll_q) / n
    if n > 10:
        var_p = (sum(x * x for x in nll_p) / n - m_p * m_p) / (n - 1)
        var_q = (sum(x * x for x in nll_q) / n - m_q * m_q) / (n - 1)
        cov = (sum(a * b for a, b in zip(nll_q, nll_p, strict=True)) / n - m_p * m_q) / (n - 1)
        error = math.sqrt(var_p + var_q - 2 * cov)
    else:
        error = 0.0
    share = sum(same) / len(same)
    return {
        "kld": mean_and_error(kld),
        "kld_quantiles": [quantile(kld, at) for at in QUANTILES],
        "delta_p": mean_and_error(delta),
        "delta_p_quantiles": [quantile(delta, at) for at in QUANTILES],
        "rms_delta_p": (rms, 0.5 / rms * mean_and_error(squares)[1]),
        "same_top": (share, math.sqrt(share * (1 - share) / (len(same) - 1))),
        "log_perplexity_ratio": (float(m_q - m_p), error),
    }


def as_plain(found: KldStatistics) -> dict[str, object]:
    return {
        "kld": (found.kld.value, found.kld.error),
        "kld_quantiles": list(found.kld_quantiles.values()),
        "delta_p": (found.delta_p.value, found.delta_p.error),
        "delta_p_quantiles": list(found.delta_p_quantiles.values()),
        "rms_delta_p": (found.rms_delta_p.value, found.rms_delta_p.error),
        "same_top": (found.same_top.value, found.same_top.error),
        "log_perplexity_ratio": (found.log_perplexity_ratio.value, found.log_perplexity_ratio.error),
    }


@pytest.mark.parametrize("positions", [2, 10, 11, 12, 300])
def test_the_seven_statistics(positions: int) -> None:
    """Ten values have no error, eleven do."""
    p, q, actual = two_models(positions, 200, positions)
    log_p, log_q = log_softmax(p), log_softmax(q)
    rows = np.arange(positions)
    same = log_p.argmax(axis=1) == log_q.argmax(axis=1)
    found = kld_statistics(kld_of(log_p, log_q), same.astype(float), log_p[rows, actual], log_q[rows, actual])
    # Every sum over the vocabulary in plain Python.
    kld = [
        math.fsum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True) if a > -16.0)
        for x, y in zip(log_p.tolist(), log_q.tolist(), strict=True)
    ]
    expected = reference(
        kld, same.astype(int).tolist(), log_p[rows, actual].tolist(), log_q[rows, actual].tolist()
    )
    assert found is not None
    for name, value in as_plain(found).items():
        assert value == pytest.approx(expected[name], abs=1e-6, rel=1e-6), name
    ratio = math.exp(np.mean(log_p[rows, actual]) - np.mean(log_q[rows, actual]))
    assert found.perplexity_ratio == pytest.approx(ratio, rel=1e-9)
    assert (found.kld.error == 0.0) == (positions <= 10)


def test_an_error_that_takes_the_sides_for_independent_is_caught() -> None:
    """Known-bad: without the covariance the error of the perplexities' ratio is several times too large."""
    p, q, actual = two_models(300, 200, 1)
    rows = np.arange(300)
    a, b = log_softmax(p)[rows, actual], log_softmax(q)[rows, actual]
    found = kld_statistics(np.ones(300), np.ones(300), a, b)
    assert found is not None
    independent = math.sqrt((a.var() + b.var()) / 299)
    assert independent > 3 * found.log_perplexity_ratio.error


def test_equal_models_differ_in_nothing() -> None:
    p, _, actual = two_models(40, 50, 2)
    log_p = log_softmax(p)
    own = log_p[np.arange(40), actual]
    found = kld_statistics(kld_of(log_p, log_p), np.ones(40), own, own)
    assert found is not None
    assert found.kld.value == found.kld.error == found.rms_delta_p.value == found.rms_delta_p.error == 0.0
    assert found.perplexity_ratio == found.same_top.value == 1.0


def test_nothing_has_no_statistics() -> None:
    none, one = np.zeros(0), np.ones(1)
    assert kld_statistics(none, none, none, none) is None
    assert kld_statistics(one, one, none, none) is None


def test_what_is_stored_is_16_bits_of_the_upper_16_nats() -> None:
    """Code by code: round to the nearest of 65,536 values between the largest and at most 16 below it."""
    logits = np.array([[0.0, -1.0, -15.9, -40.0], [3.0, 2.5, 2.0, 1.0]])
    found = stored(logits)
    for row, read in zip(logits.tolist(), found.tolist(), strict=True):
        top, least = max(row), max(min(row), max(row) - 16)
        log_total = math.log(sum(math.exp(x) for x in row))
        step = (top - least) / 65535
        for value, back in zip(row, read, strict=True):
            code = round((max(value, least) - least) / step)
            assert back == pytest.approx(least + code * step - log_total, abs=1e-12)
            assert abs(back - (max(value, least) - log_total)) <= step / 2 + 1e-12


def test_quantised_and_cut_the_divergence_may_be_a_little_below_zero() -> None:
    p, _, _ = two_models(200, 500, 3)
    kld = kld_of(stored(p), log_softmax(p))
    assert kld.min() < 0.0
    assert np.abs(kld).max() < 1e-3
