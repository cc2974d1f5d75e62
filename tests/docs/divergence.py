"""Table and plot of docs/divergence.md: `python -m tests.docs.divergence` prints, `--write` renews both.

Every recorded variant: the true divergence over the whole vocabulary beside what four estimators make of two
lists of five. The estimators that are not ours are plain Python from their definitions.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from pipeline.core.divergence.lists import TopLists
from pipeline.core.divergence.measures import measure

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGE: Final = REPOSITORY / "docs" / "divergence.md"
PLOT: Final = REPOSITORY / "docs" / "divergence.svg"
BEGIN: Final = "<!-- made by `make divergence` -->\n"
END: Final = "<!-- end -->\n"
K: Final = 5
ETA: Final = 1e-6
STORED: Final = 3e-5
"""How good the stored truth is."""
VARIANTS: Final = {
    ("greedy", "same"): "same engine, other batch shape",
    ("sample", "same"): "the same, sampled",
    ("greedy", "fp8_cal"): "FP8 KV, calibrated",
    ("sample", "fp8_cal"): "the same, sampled",
    ("greedy", "temp0.7"): "log-probabilities after T = 0.7",
    ("greedy", "q4_0"): "4-bit KV",
    ("greedy", "mismatch_x1.25"): "FP8, prompt KV scale × 1.25",
    ("sample", "mismatch_x1.25"): "the same, sampled",
    ("greedy", "mismatch_x2"): "FP8, prompt KV scale × 2",
}
ESTIMATORS: Final = ("kl_lower", "kl_floor", "tail bucket", "intersection")
_COLOURS: Final = ("#0b6e4f", "#c1121f", "#5f5f5f", "#e08e0b")

Entries = Mapping[int, float]


@dataclass(frozen=True)
class Row:
    """A variant: means over its positions, and how many positions each estimator puts above the truth."""

    what: str
    positions: int
    truth: float
    means: dict[str, float]
    above: dict[str, int]


def tail_bucket(p: Entries, q: Entries) -> float:
    """Tokens on both lists, and all else as one."""
    common = [token for token in p if token in q]
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in common)
    p_rest = max(1 - sum(math.exp(p[token]) for token in common), 0.0)
    q_rest = max(1 - sum(math.exp(q[token]) for token in common), ETA)
    return total + (p_rest * math.log(p_rest / q_rest) if p_rest > 0 else 0.0)


def intersection(p: Entries, q: Entries) -> float:
    """Tokens on both lists alone, either side renormalised; NaN where there are none."""
    common = [token for token in p if token in q]
    if not common:
        return math.nan
    log_p = math.log(sum(math.exp(p[token]) for token in common))
    log_q = math.log(sum(math.exp(q[token]) for token in common))
    return sum(math.exp(p[t] - log_p) * (p[t] - log_p - q[t] + log_q) for t in common)


def row_of(folder: Path, answers: str, variant: str, what: str) -> Row:
    """One variant, at all of its positions."""
    base, canary = np.load(folder / f"base.{answers}.npz"), np.load(folder / f"tf.{answers}.{variant}.npz")
    sides = [(base["top_ids"][:, :K], base["top_lp"][:, :K]), (canary["top_ids"], canary["top_lp"])]
    truth = canary["kl_true"].astype(np.float64)
    ours = measure(*(_lists(ids, logprobs) for ids, logprobs in sides), np.full(len(truth), ETA))
    p, q = ([dict(zip(*row, strict=True)) for row in _rows(ids, logprobs)] for ids, logprobs in sides)

    def each(estimate: Callable[[Entries, Entries], float]) -> np.ndarray:
        return np.array([estimate(a, b) for a, b in zip(p, q, strict=True)])

    found = {
        "kl_lower": ours.kl_lower,
        "kl_floor": ours.kl_floor,
        "tail bucket": each(tail_bucket),
        "intersection": each(intersection),
    }
    allowed = truth + STORED + ETA * (2 + ours.kl_lower + math.log(1 / ETA))
    return Row(
        what,
        len(truth),
        float(truth.mean()),
        {name: float(np.nanmean(values)) for name, values in found.items()},
        {name: int((values > allowed).sum()) for name, values in found.items()},
    )


def _lists(ids: np.ndarray, logprobs: np.ndarray) -> TopLists:
    values = np.array(logprobs.T, dtype=np.float64, order="C")
    return TopLists(np.array(ids.T, dtype=np.int64, order="C"), values, values.min(axis=0))


def _rows(ids: np.ndarray, logprobs: np.ndarray) -> zip[tuple[list[int], list[float]]]:
    return zip(ids.tolist(), logprobs.astype(np.float64).tolist(), strict=True)


def rows(shared: Path) -> list[Row]:
    """All variants, in the order of VARIANTS; ValueError if others are there."""
    folder = shared / "data" / "logits"
    names = {tuple(path.name.removesuffix(".npz").split(".", 2)[1:]) for path in folder.glob("tf.*.npz")}
    if names != set(VARIANTS):
        raise ValueError(f"{folder}: not the variants that are described here: {names ^ set(VARIANTS)}")
    return [row_of(folder, *variant, what) for variant, what in VARIANTS.items()]


def table(found: Sequence[Row]) -> str:
    """Markdown; in brackets, at how many positions an estimator is above the truth."""
    lines = [
        "| canary | positions | true KL | `kl_lower` | `kl_floor` | tail bucket | intersection |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        cells = [f"{row.means[name]:.3g} ({row.above[name]})" for name in ESTIMATORS]
        lines.append(f"| {row.what} | {row.positions} | {row.truth:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_LEFT, _TOP, _SIDE = 60, 16, 400
_LOW, _HIGH = -4.0, 2.0
"""Powers of ten at the ends of both axes."""


def plot(found: Sequence[Row]) -> str:
    """SVG: estimates over the truth, on logarithmic axes; what stands above the diagonal claims too much."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 470" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="620" height="470" fill="#ffffff"/>',
    ]
    for power in range(int(_LOW), int(_HIGH) + 1):
        x, y = _x(10.0**power), _y(10.0**power)
        label = f"{10.0**power:g}"
        parts += [
            f'<path d="M{x:.1f} {_TOP}V{_TOP + _SIDE}M{_LEFT} {y:.1f}H{_LEFT + _SIDE}" stroke="#dddddd"/>',
            f'<text x="{x:.1f}" y="{_TOP + _SIDE + 16}" text-anchor="middle">{label}</text>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    bottom = _TOP + _SIDE
    parts += [
        f'<path d="M{_LEFT} {bottom}L{_LEFT + _SIDE} {_TOP}" stroke="#000000"/>',
        f'<text x="{_LEFT + _SIDE // 2}" y="{bottom + 36}" text-anchor="middle">true KL, nats</text>',
        f'<text x="{_LEFT + 8}" y="{_TOP + 16}">above the line: more than there is</text>',
    ]
    for number, (name, colour) in enumerate(zip(ESTIMATORS, _COLOURS, strict=True)):
        marks = [_mark(number, _x(row.truth), _y(row.means[name]), colour) for row in found]
        key = _TOP + 20 + 22 * number
        parts += [
            *marks,
            _mark(number, _LEFT + _SIDE + 24, key, colour),
            f'<text x="{_LEFT + _SIDE + 36}" y="{key + 4}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(value: float) -> float:
    return _LEFT + _SIDE * _along(value)


def _y(value: float) -> float:
    return _TOP + _SIDE * (1 - _along(value))


def _along(value: float) -> float:
    return (math.log10(value) - _LOW) / (_HIGH - _LOW)


def _mark(number: int, x: float, y: float, colour: str) -> str:
    """A shape of its own for each estimator: colours alone do not tell them apart for everyone."""
    if number == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
    paths = (
        f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10",
        f"M{x - 5:.1f} {y:.1f}h10m-5 -5v10",
        f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
    )
    return f'<path d="{paths[number - 1]}" fill="none" stroke="{colour}" stroke-width="2"/>'


def in_page(page: str) -> str:
    """The table that stands in the page."""
    return page.split(BEGIN)[1].split(END)[0]


def main(arguments: Sequence[str]) -> int:
    """Print the table; with --write, renew page and plot."""
    shared = Path(os.environ.get("KLAXON_SHARED", REPOSITORY.parent / "shared"))
    if not (shared / "data" / "logits").is_dir():
        print(
            f"no shared data at {shared}; set KLAXON_SHARED to the folder that holds data/", file=sys.stderr
        )
        return 3
    found = rows(shared)
    print(table(found), end="")
    if "--write" in arguments:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(before + BEGIN + table(found) + END + after, encoding="utf-8")
        PLOT.write_text(plot(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
