"""How much of what was mirrored could be scored, and what kept the rest from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.core.cells import ALL
from pipeline.core.gate.metrics import COUNT, EXCESS, VALUE, Vec, add_into
from pipeline.core.gate.policy import Coverage
from pipeline.core.gate.rules import WHOLE
from pipeline.core.gate.windows import Window
from schemas.buckets import PopulationCells
from schemas.control import Evaluation, Verdict

LOST: Final = (
    "no_canary", "no_baseline", "no_control", "ambiguous", "late", "definition_mismatch",
    "identity_mismatch", "forced_mismatch", "no_position", "dropped", "other",
)  # fmt: skip
"""Why a mirrored request was not scored, as coverage tells it: a slot of its vectors each."""


@dataclass(frozen=True, slots=True)
class CoverageVerdict:
    """`value` = scored ÷ expected over the window; None where nothing was expected."""

    verdict: Verdict
    value: float | None
    expected: int
    low: bool
    reason: str
    evaluation: Evaluation


@dataclass(slots=True)
class JudgedCoverage:
    """How much of what was mirrored could be scored."""

    coverage: Coverage
    window: Window

    @classmethod
    def of(cls, coverage: Coverage) -> JudgedCoverage:
        """An empty one."""
        return cls(coverage, Window(coverage.window_s))

    def judge(self, unknown: str) -> CoverageVerdict:
        """At the newest folded second. Too few expected pairs: not enough data, and not `low`."""
        total = self.window.total(WHOLE)
        expected, scored = total.get(COUNT, 0), total.get(VALUE, 0)
        value = scored / expected if expected else None
        low = expected >= self.coverage.min_samples and scored < self.coverage.limit * expected
        verdict: Verdict = "pass"
        reason = ""
        mismatched = total.get(EXCESS, 0)
        if expected < self.coverage.min_samples:
            verdict = "not_enough_data"
            reason = f"{expected} of {self.coverage.min_samples} mirrored requests"
            if mismatched:
                reason += f"; {mismatched} pairs not compared: their versions are not those under test"
        elif low:
            verdict = "not_enough_data"
            reason = f"coverage {scored / expected:.3f} is below {float(self.coverage.limit):g}"
        elif unknown:
            verdict, reason = "not_enough_data", unknown
        evaluation = Evaluation(
            rule="coverage",
            scope="rollout",
            verdict=verdict,
            metric="coverage",
            value=value,
            limit=float(self.coverage.limit),
            samples=expected,
            reason=reason,
        )
        return CoverageVerdict(verdict, value, expected, low, reason, evaluation)


def coverage_vec(counters: Mapping[str, int]) -> Vec:
    """What a pair cell adds to coverage: expected = scored + unmatched except duplicates + reported drops."""
    scored = counters.get("pairs", 0) + counters.get("renormalised", 0)
    vec: Vec = {}
    add_into(vec, {COUNT: scored, VALUE: scored})
    for name, count in counters.items():
        lost = "dropped" if name == "dropped" else name.removeprefix("unmatched.")
        if lost != "duplicate" and (lost != name or name == "dropped"):
            add_into(vec, {COUNT: count, _lost_slot(lost): count})
    return vec


def lost_vec(population_cells: PopulationCells) -> Vec:
    """Halves that never became a pair: they stand under no difference, whatever the arms differ in."""
    vec: Vec = {}
    for cell in population_cells.cells:
        if cell.dimension == ALL:
            lost = {
                name: count for name, count in cell.counters.items() if name not in ("pairs", "renormalised")
            }
            add_into(vec, coverage_vec(lost))
    return vec


def dropped_vec(population_cells: PopulationCells) -> Vec:
    """Halves that a producer reports it dropped: pairs that never came to be."""
    dropped = sum(cell.counters.get("dropped", 0) for cell in population_cells.cells if cell.dimension == ALL)
    return coverage_vec({"dropped": dropped}) if dropped else {}


def lost_by_reason(vec: Mapping[int, int]) -> dict[str, int]:
    """What a coverage vector lacks, by reason, the greatest first."""
    found = {name: count for name in LOST if (count := vec.get(_lost_slot(name), 0))}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _lost_slot(reason: str) -> int:
    return EXCESS + 1 + LOST.index(reason if reason in LOST else "other")
