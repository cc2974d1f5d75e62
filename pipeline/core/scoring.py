"""Formed pairs and counts, in log order, into evidence and into rows for `klaxon.pairs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Final, TypeAlias

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.bins import EXCESS_SHIFT, SCORE_MAX
from pipeline.core.cells import ALL
from pipeline.core.divergence import ESTIMATOR, Matched, PairScores
from pipeline.core.evidence import SECOND_US, Dimension, Evidence
from pipeline.core.formed import Count, Excess, Formed, Pair, Pairs, rows_of
from pipeline.core.pair_labels import PairLabels, Places
from pipeline.core.pair_rows import RENORMALISED, SCORES, Column, PairRows
from schemas.buckets import SCORE_ONE, Population
from schemas.columns import F8, I8, Bool

Scorer: TypeAlias = Callable[[Matched], PairScores]

_MEASURED: Final = tuple(name for name in SCORES if name != "kl_lower_max")


def to_units(scores: F8) -> I8:
    """Scores in nats (or shares) as integers of 2⁻³⁰, rounded half to even, cut at ±1,024."""
    return np.clip(np.rint(scores * SCORE_ONE), -SCORE_MAX, SCORE_MAX).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one source formed since it was last settled, in log order.

    What counts before the second `whole_from`, and pairs formed before it, are left out.
    """

    items: Sequence[Formed]
    whole_from: int
    found: PairRows
    """Scored pairs are added to it."""


def settle(waiting: Sequence[Waiting], score: Scorer) -> tuple[Evidence, list[int]]:
    """What waits in some sources, one or more items, as evidence, and how many of its rows each has in turn.

    Together, as a call of numpy costs about the same for a few pairs and for a hundred.
    """
    items = [each.items for each in waiting]
    pairs_of = [[item for item in held if isinstance(item, Pairs | Pair)] for held in items]
    pairs = list(chain.from_iterable(pairs_of))
    places = Places.of(pairs)
    scores = score(places.matched)
    units = {name: to_units(getattr(scores, name)) for name in SCORES}
    formed = _FormedPairs.of(pairs)
    _tell_scores(formed, scores, units["kl_lower"])
    excesses: list[Excess] = []
    if len(pairs) < sum(map(len, items)):
        # Only now is it known which differences there are: a pair that has no score leaves none.
        items = [
            [item for item in held if not isinstance(item, Excess) or _is_difference(item)] for held in items
        ]
        excesses = [item for item in chain.from_iterable(items) if isinstance(item, Excess)]
    labels = None
    if pairs or excesses:
        if excesses:
            places = Places.of([*pairs, *(item.canary for item in excesses)])
        labels = PairLabels(places)
    rows = _Rows(list(chain.from_iterable(items)), labels)
    if labels is not None:
        scored = _Scored(formed, scores, units, labels)
        rows.add_pairs(scored)
        rows.add_excesses(excesses)
        for (first, last), each in zip(_bounds(pairs_of), waiting, strict=True):
            scored.add_to(each.found, first, last, each.whole_from)
    evidence = rows.evidence()
    sizes = [sum(map(rows_of, held)) for held in items]
    kept = evidence.second >= np.repeat([each.whole_from for each in waiting], sizes)
    through = np.concatenate(([0], np.cumsum(kept)))[np.cumsum(sizes)]
    return evidence.only(kept), np.diff(through, prepend=0).tolist()


def _bounds(parts: Sequence[Sequence[Formed]]) -> Iterator[tuple[int, int]]:
    """Where the rows of each of these begin and end when they stand one after the other."""
    ends = accumulate((sum(map(rows_of, part)) for part in parts), initial=0)
    return pairwise(ends)


@dataclass(frozen=True, slots=True)
class _FormedPairs:
    """Where in the log n pairs formed, and which of them may be compared with another; arrays (n,)."""

    formed_us: I8
    closed_through: I8
    grouped: list[tuple[int, Pair]]
    """Row and pair, of the pairs of larger groups."""

    @staticmethod
    def of(pairs: Sequence[Pairs | Pair]) -> _FormedPairs:
        """These pairs, in order."""
        sizes = list(map(rows_of, pairs))
        begins = accumulate(sizes, initial=0)
        formed_us: I8 = np.array([each.formed_us for each in pairs], dtype=np.int64)
        closed_through: I8 = np.array([each.closed_through for each in pairs], dtype=np.int64)
        return _FormedPairs(
            formed_us.repeat(sizes),
            closed_through.repeat(sizes),
            [(row, each) for row, each in zip(begins, pairs, strict=False) if isinstance(each, Pair)],
        )


def _tell_scores(formed: _FormedPairs, scores: PairScores, kl_lower: I8) -> None:
    """Tell each pair that may be compared with another its score."""
    for row, pair in formed.grouped:
        if scores.positions[row] > 0 and not scores.renormalised[row]:
            pair.kl_lower = int(kl_lower[row])


def _is_difference(item: Excess) -> bool:
    return item.canary.kl_lower is not None and item.control.kl_lower is not None


class _Scored:
    """Pairs with their scores; arrays have one entry per pair."""

    def __init__(
        self, formed: _FormedPairs, scores: PairScores, units: Mapping[str, I8], labels: PairLabels
    ) -> None:
        """`labels`: of these pairs, and then of others."""
        self.formed_us = formed.formed_us
        self.scores = scores
        self.units = units
        self._labels = labels
        self.has_score: Bool = scores.positions > 0
        n = len(formed.formed_us)
        self._controls = _controls(formed.grouped, n)
        named, own = labels.has_pair_id[:n], labels.event_us[:n] // SECOND_US
        self.late: Bool = named & (own <= formed.closed_through)
        # Halves without a pair id pair at their deadline, and count in that second of log time.
        judged = self.has_score & ~self.late
        self.second: I8 = np.where(named & judged, own, self.formed_us // SECOND_US)
        """The bucket: of the pair if it is judged, else of the log time at which it formed."""

    def names(self) -> list[bytes]:
        """What the pairs are called."""
        return self._labels.names(np.arange(len(self.formed_us)))

    def add_to(self, found: PairRows, first: int, last: int, whole_from: int) -> None:
        """Add those of the pairs first..last (exclusive) that have a score and formed from this second on."""
        chosen = self.has_score[first:last] & (self.formed_us[first:last] >= whole_from * SECOND_US)
        renormalised = self.scores.renormalised[first:last]
        for estimator, made_so in ((ESTIMATOR, ~renormalised), (RENORMALISED, renormalised)):
            at = np.flatnonzero(chosen & made_so)
            if len(at):
                found.add(estimator, self._rows(at + first))

    def _rows(self, at: I8) -> dict[str, Column]:
        """Those pairs as columns of PairBatch."""
        labels, scores = self._labels, self.scores
        return {
            "rollout": labels.rollout[at],
            "model_version": labels.model_version[at],
            "baseline_version": labels.baseline_version[at],
            "node": labels.node[at],
            "baseline_node": labels.baseline_node[at],
            "request_type": labels.request_type[at],
            "arm": labels.arm[at],
            "generation": labels.generation[at],
            "differs": labels.differs[at],
            "input_tokens": labels.input_tokens[at],
            "signature": labels.signature[at],
            "pair_id": labels.pair_id[at],
            "has_pair_id": labels.has_pair_id[at],
            "event_us": labels.event_us[at],
            "formed_us": self.formed_us[at],
            "first_offset": labels.first_offset[at],
            "first_position": labels.first_position[at],
            "positions": scores.positions[at],
            "agreed": scores.agreed[at],
            "first_difference": scores.first_difference[at],
            "ended_together": scores.ended_together[at],
            "late": self.late[at],
            **{name: units[at] for name, units in self.units.items()},
            **{name: values[at] for name, values in self._controls.items()},
        }


def _controls(grouped: Sequence[tuple[int, Pair]], n: int) -> dict[str, I8 | Bool]:
    """Scores of the controls that were known when n pairs were scored, and which were."""
    controls, known = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.bool_)
    for row, pair in grouped:
        control = pair.control
        if control is not None and control.kl_lower is not None and pair.kl_lower is not None:
            controls[row], known[row] = control.kl_lower, True
    return {"control_kl_lower": controls, "has_control": known}


_KIND: Final[dict[type, type]] = {Pairs: Pair, Pair: Pair, Excess: Excess, Count: Count}


def _places(items: Sequence[Formed]) -> dict[type, I8]:
    """Which rows are of what kind."""
    kinds = [_KIND[type(item)] for item in items]
    sizes = list(map(rows_of, items))
    return {
        kind: np.flatnonzero(np.repeat([each is kind for each in kinds], sizes))
        for kind in (Pair, Excess, Count)
    }


class _Rows:
    """One row of evidence per item, in log order."""

    def __init__(self, items: Sequence[Formed], labels: PairLabels | None) -> None:
        self._n = sum(map(rows_of, items))
        self._labels = labels
        self._at = _places(items)
        self._pair: I8 = np.zeros(self._n, dtype=np.int64)
        """Which pair of the labels a row speaks of; any, for a count."""
        self._second: I8 = np.zeros(self._n, dtype=np.int64)
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
        self._add_counts([item for item in items if isinstance(item, Count)])

    def add_pairs(self, scored: _Scored) -> None:
        """Judged, or counted as what keeps them from it."""
        at = self._at[Pair]
        self._second[at] = scored.second
        judged, renormalised = scored.has_score & ~scored.late, scored.scores.renormalised
        if not judged.all():
            for row in np.flatnonzero(~scored.has_score).tolist():
                self._total(f"unmatched.{scored.scores.outcome[row]}")[at[row]] = 1
            self._total("unmatched.late")[at[scored.has_score & scored.late]] = 1
        alone = judged & renormalised
        self._fill(at[alone], "renormalised", {"kl_renormalised": scored.units["kl_lower"][alone]})
        plain = judged & ~renormalised
        measures = {name: scored.units[name][plain] for name in _MEASURED}
        self._fill(at[plain], "pairs", {"positions": scored.scores.positions[plain], **measures})
        names = scored.names()
        if len(at) == self._n:
            self._ids = names
        else:
            for row, name in zip(at.tolist(), names, strict=True):
                self._ids[row] = name

    def add_excesses(self, excesses: Sequence[Excess]) -> None:
        """Paired differences of canary and control."""
        if not excesses:
            return
        at = self._at[Excess]
        self._second[at] = [item.second for item in excesses]
        control = np.array([item.control.kl_lower for item in excesses], dtype=np.int64)
        canary = np.array([item.canary.kl_lower for item in excesses], dtype=np.int64)
        # A prompt on which the baseline does not reproduce itself tells nothing (statistics.md §0.3).
        out = control > EXCESS_SHIFT
        self._fill(at[out], "excess_left_out", {})
        self._fill(at[~out], None, {"excess": (canary - control + EXCESS_SHIFT)[~out]})

    def _add_counts(self, counts: Sequence[Count]) -> None:
        """What is no evidence but counts."""
        known = self._populations
        for row, item in zip(self._at[Count].tolist(), counts, strict=True):
            self._second[row] = item.second
            self._population[row] = known.setdefault(item.population, len(known))
            self._total(item.name)[row] = item.n

    def _fill(self, rows: I8, counter: str | None, measures: Mapping[str, I8]) -> None:
        """Full rows, ascending, with a counter of 1 and these values."""
        if len(rows) == 0:
            return
        present = np.zeros(self._n, dtype=np.bool_)
        present[rows] = True
        self._full |= present
        if counter is not None:
            self._counters[counter] = present.astype(np.int64)
        for name, values in measures.items():
            held = values
            if len(rows) < self._n:
                held = np.zeros(self._n, dtype=np.int64)
                held[rows] = values
            self._measures[name] = held, present

    def _total(self, name: str) -> I8:
        if name not in self._totals:
            self._totals[name] = np.zeros(self._n, dtype=np.int64)
        return self._totals[name]

    def evidence(self) -> Evidence:
        """What all rows say."""
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
        )
