"""Formed pairs and counts, in log order, into evidence and into rows for `klaxon.pairs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.bins import EXCESS_SHIFT, SCORE_MAX
from pipeline.core.cells import ALL
from pipeline.core.divergence import ESTIMATOR, Half, PairScores
from pipeline.core.evidence import SECOND_US, Dimension, Evidence
from pipeline.core.formed import Count, Excess, Formed, Pair
from pipeline.core.groups import name_of, pair_id_of, signature_of
from pipeline.core.pair_labels import PairLabels
from pipeline.core.pair_rows import RENORMALISED, SCORES, PairRows
from schemas.buckets import SCORE_ONE, Population
from schemas.columns import F8, I8, Bool

Scorer: TypeAlias = Callable[[Sequence[tuple[Half, Half]]], PairScores]

_MEASURED: Final = tuple(name for name in SCORES if name != "kl_lower_max")


def to_units(scores: F8) -> I8:
    """Scores in nats (or shares) as integers of 2⁻³⁰, rounded half to even, cut at ±1,024."""
    return np.clip(np.rint(scores * SCORE_ONE), -SCORE_MAX, SCORE_MAX).astype(np.int64)


def settle(pending: Sequence[Formed], score: Scorer, whole_from: int, found: PairRows) -> Evidence:
    """What was formed since the last time, in log order, as evidence; adds the scored pairs to `found`.

    What counts before the second `whole_from`, and pairs formed before it, are left out.
    """
    pairs = [item for item in pending if isinstance(item, Pair)]
    scored = _Scored(pairs, score([(_half(p.baseline), _half(p.other)) for p in pairs]))
    # Only now is it known which differences there are: a pair that has no score leaves none.
    items = [item for item in pending if not isinstance(item, Excess) or _is_difference(item)]
    excesses = [item for item in items if isinstance(item, Excess)]
    labels = PairLabels([*pairs, *(item.canary for item in excesses)]) if pairs or excesses else None
    rows = _Rows(items, labels)
    if labels is not None:
        rows.add_pairs(scored)
        rows.add_excesses(excesses)
    rows.add_counts([item for item in items if isinstance(item, Count)])
    if labels is not None:
        for estimator, chosen in ((ESTIMATOR, ~scored.renormalised), (RENORMALISED, scored.renormalised)):
            at = np.flatnonzero(scored.has_score & chosen & (scored.formed_us >= whole_from * SECOND_US))
            if len(at):
                found.add(estimator, scored.columns(at, labels))
    return rows.evidence(whole_from)


def _half(arrival: tuple[Any, int]) -> Half:
    record, at = arrival
    return Half(record.columns, at)


def _is_difference(item: Excess) -> bool:
    return item.canary.kl_lower is not None and item.control.kl_lower is not None


class _Scored:
    """Pairs with their scores; arrays have one entry per pair."""

    def __init__(self, pairs: Sequence[Pair], scores: PairScores) -> None:
        """Tells each comparable pair its `kl_lower`."""
        self.pairs = pairs
        self.scores = scores
        self.outcome = np.array(scores.outcome, dtype=np.object_)
        self.has_score: Bool = self.outcome == "scored"
        self.renormalised = scores.renormalised
        self.units = {name: to_units(getattr(scores, name)) for name in SCORES}
        self.formed_us: I8 = np.array([pair.formed_us for pair in pairs], dtype=np.int64)
        self.late: Bool = np.array([pair.late for pair in pairs], dtype=np.bool_)
        comparable = (self.has_score & ~self.renormalised).tolist()
        for pair, kl_lower, known in zip(pairs, self.units["kl_lower"].tolist(), comparable, strict=True):
            if known:
                pair.kl_lower = kl_lower

    def columns(self, at: I8, labels: PairLabels) -> dict[str, list[Any]]:
        """Those pairs as columns of PairBatch, texts as texts."""
        pairs = [self.pairs[row] for row in at.tolist()]
        keys = [pair.group.key for pair in pairs]
        ended: tuple[bool | None, ...] = (False, True, None)  # ABSENT is -1: the last entry
        return {
            "rollout": labels.rollout[at].tolist(),
            "arm": labels.arm[at].tolist(),
            "generation": [ev.or_none(each) for each in labels.generation[at].tolist()],
            "model_version": [version or "" for version in labels.model_version[at].tolist()],
            "baseline_version": [version or "" for version in labels.baseline_version[at].tolist()],
            "differs": labels.differs[at].tolist(),
            "node": labels.node[at].tolist(),
            "baseline_node": labels.baseline_node[at].tolist(),
            "request_type": labels.request_type[at].tolist(),
            "input_tokens": labels.input_tokens[at].tolist(),
            "signature": [signature_of(key) for key in keys],
            "pair_id": [pair_id_of(key) for key in keys],
            "event_us": [pair.event_us for pair in pairs],
            "formed_us": self.formed_us[at].tolist(),
            "first_offset": labels.first_offset[at].tolist(),
            "first_position": labels.first_position[at].tolist(),
            "positions": self.scores.positions[at].tolist(),
            "agreed": self.scores.agreed[at].tolist(),
            "first_difference": [ev.or_none(each) for each in self.scores.first_difference[at].tolist()],
            "ended_together": [ended[each] for each in self.scores.ended_together[at].tolist()],
            "late": self.late[at].tolist(),
            "control_kl_lower": [
                None if pair.control is None or pair.kl_lower is None else pair.control.kl_lower
                for pair in pairs
            ],
            **{name: units[at].tolist() for name, units in self.units.items()},
        }


class _Rows:
    """One row of evidence per item, in log order."""

    def __init__(self, items: Sequence[Formed], labels: PairLabels | None) -> None:
        self._n = len(items)
        self._labels = labels
        self._at: dict[type, I8] = {
            kind: np.array([at for at, item in enumerate(items) if isinstance(item, kind)], dtype=np.int64)
            for kind in (Pair, Excess, Count)
        }
        """Which rows are of what kind."""
        self._pair: I8 = np.zeros(self._n, dtype=np.int64)
        """Which pair of the labels a row speaks of; any, for a count."""
        self._second: I8 = np.array([item.second for item in items], dtype=np.int64)
        self._population: I8 = np.zeros(self._n, dtype=np.int64)
        self._populations: dict[Population, int] = {}
        self._full: Bool = np.zeros(self._n, dtype=np.bool_)
        self._ids = [b""] * self._n
        self._counters: dict[str, I8] = {}
        self._totals: dict[str, I8] = {}
        self._measures: dict[str, tuple[I8, Bool]] = {}
        if labels is not None:
            of_pairs = np.concatenate((self._at[Pair], self._at[Excess]))
            self._pair[of_pairs] = np.arange(len(of_pairs))
            self._population[of_pairs] = labels.population
            self._populations = {each: at for at, each in enumerate(labels.populations)}

    def add_pairs(self, scored: _Scored) -> None:
        """Judged, or counted as what keeps them from it in the second of log time in which they formed."""
        at = self._at[Pair]
        judged = scored.has_score & ~scored.late
        self._second[at[~judged]] = scored.formed_us[~judged] // SECOND_US
        for reason in set(scored.scores.outcome) - {"scored"}:
            self._total(f"unmatched.{reason}")[at[scored.outcome == reason]] = 1
        self._total("unmatched.late")[at[scored.has_score & scored.late]] = 1
        alone = judged & scored.renormalised
        self._fill(at[alone], "renormalised", {"kl_renormalised": scored.units["kl_lower"][alone]})
        plain = judged & ~scored.renormalised
        measures = {name: scored.units[name][plain] for name in _MEASURED}
        self._fill(at[plain], "pairs", {"positions": scored.scores.positions[plain], **measures})
        for row, pair in zip(at.tolist(), scored.pairs, strict=True):
            self._ids[row] = name_of(pair.group.key)

    def add_excesses(self, excesses: Sequence[Excess]) -> None:
        """Paired differences of canary and control."""
        at = self._at[Excess]
        control = np.array([item.control.kl_lower for item in excesses], dtype=np.int64)
        canary = np.array([item.canary.kl_lower for item in excesses], dtype=np.int64)
        # A prompt on which the baseline does not reproduce itself tells nothing (statistics.md §0.3).
        out = control > EXCESS_SHIFT
        self._fill(at[out], "excess_left_out", {})
        self._fill(at[~out], None, {"excess": (canary - control + EXCESS_SHIFT)[~out]})

    def add_counts(self, counts: Sequence[Count]) -> None:
        """What is no evidence but counts."""
        known = self._populations
        for row, item in zip(self._at[Count].tolist(), counts, strict=True):
            self._population[row] = known.setdefault(item.population, len(known))
            self._total(item.name)[row] = item.n

    def _fill(self, rows: I8, counter: str | None, measures: Mapping[str, I8]) -> None:
        """Full rows, with a counter of 1 and these values."""
        self._full[rows] = True
        if counter is not None and len(rows):
            self._counters[counter] = np.zeros(self._n, dtype=np.int64)
            self._counters[counter][rows] = 1
        for name, values in measures.items():
            held, present = np.zeros(self._n, dtype=np.int64), np.zeros(self._n, dtype=np.bool_)
            held[rows], present[rows] = values, True
            self._measures[name] = held, present

    def _total(self, name: str) -> I8:
        if name not in self._totals:
            self._totals[name] = np.zeros(self._n, dtype=np.int64)
        return self._totals[name]

    def evidence(self, whole_from: int) -> Evidence:
        """What all rows say, from the second `whole_from` on."""
        dimensions: list[Dimension] = [ev.constant(ALL, "", self._n)]
        if self._labels is not None:
            dimensions += self._labels.dimensions(self._pair, self._full)
        return Evidence(
            second=self._second,
            populations=list(self._populations),
            population=self._population,
            dimensions=dimensions,
            counters=self._counters,
            totals=self._totals,
            measures=self._measures,
            ids=self._ids,
            worst=self._measures.get("kl_lower"),
        ).since(whole_from)
