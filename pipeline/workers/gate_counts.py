"""What the gate's shell counts: decisions, refusals, fenced writers, and how long writing them took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.core.gate.gating import Effect, GateCore
from pipeline.monitoring.metrics import MOST_ROLLOUTS
from pipeline.monitoring.timing import Timing


class GateCounts:
    """Of all seats of one process, since it began."""

    def __init__(self) -> None:
        self.decision = Timing()
        self.transaction = Timing()
        self.fenced: Counter[int] = Counter()
        """Transactions that a successor refused, by gating partition."""
        self._decisions: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def wrote(
        self, effects: Sequence[Effect], began_s: float, news_since_s: float | None, now_s: float
    ) -> None:
        """These effects are committed. `news_since_s`: since when the oldest evidence waited to be judged."""
        self.transaction.took(now_s - began_s)
        for effect in effects:
            if effect.decision is None:
                continue
            self._decisions[effect.decision.kind] += 1
            self.decision.took(now_s - (began_s if news_since_s is None else news_since_s))
            if effect.decision.kind == "refused":
                self.refused("rule")

    def refused(self, reason: str) -> None:
        """A command was not obeyed; `reason` is one of `metrics.CLOSED[Thing.REFUSED]`."""
        self._refused[reason] += 1

    def gauges(self) -> dict[str, dict[str, int]]:
        """By thing and name."""
        return {"decisions": dict(self._decisions), "refused/command": dict(self._refused)}


def seat_gauges(core: GateCore, *, taken: bool, fenced: int) -> dict[str, dict[str, int]]:
    """Of one gating partition and its roll-outs."""
    rollouts = core.rollout_gauges(MOST_ROLLOUTS)
    listed = {f"rollout/{name}": gauges for name, gauges in rollouts.items()}
    unlisted = max(len(core.names()) - MOST_ROLLOUTS, 0)
    seat = {**core.gauges(), "taken": int(taken), "fenced": fenced, "unlisted_rollouts": unlisted}
    return {f"gating/{core.partition}": seat, **listed}
