"""What an operator sees of a gating partition's roll-outs: whole numbers by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Final

from pipeline.core.gate.run import Run
from schemas.versions import version_keys

MILLION: Final = 1_000_000


def evidence_gauges(runs: Iterable[Run]) -> dict[str, int]:
    """What the rules of all of them hold, and had no room for."""
    evidence = [run.evidence for run in runs]
    return {
        "version_mismatches": sum(one.mismatched for one in evidence),
        "bets": sum(len(rule.processes.bets) for one in evidence for rule in one.sequential),
        "bets_left_out": sum(rule.processes.left_out for one in evidence for rule in one.sequential),
        "scopes": sum(len(judged.window.totals) for one in evidence for judged in one.rules),
        "scopes_left_out": sum(judged.window.no_room for one in evidence for judged in one.rules),
    }


def rollout_gauges(runs: Iterable[Run], most: int) -> dict[str, dict[str, int]]:
    """By roll-out, the `most` that began last and are not retired: of those that nobody retires, what goes on
    today must not be what is left out."""
    live = [run for run in runs if not run.memory.retired]
    newest = nsmallest(most, live, key=lambda run: (-run.memory.start_us, run.memory.rollout))
    return {run.memory.rollout: _of(run) for run in newest}


def _of(run: Run) -> dict[str, int]:
    memory = run.memory
    canary = memory.weights.get(version_keys(run.spec.arms)["canary"], 0.0)
    said = {
        "tripped": int(memory.state == "tripped"),
        "paused": int(memory.state in ("paused", "narrowed")),
        "left_out": len(memory.left_out.exclusions),
        "blind": int(bool(memory.blind)),
        "canary_millionths": round(canary / 100 * MILLION),
    }
    # Of what is decided for good it stands as it was then, and nobody can bring it back.
    coverage = None if run.last is None or memory.final else run.last.coverage
    if coverage is not None:
        said["expected_pairs"] = coverage.expected
        if coverage.value is not None:
            said["coverage_millionths"] = round(coverage.value * MILLION)
    return said
