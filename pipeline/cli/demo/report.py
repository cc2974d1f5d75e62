"""What a demo run found, as one object and as text; and whether it is what had to be found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from pipeline.cli.demo.fleet import CANARY_VERSION, FAULTY_NODE, ROLLOUT
from pipeline.cli.printing import counted
from schemas.control import Directive, Located

Fault = Literal["long_context", "none"]
FAULTY_CELL: Final = f"{FAULTY_NODE}|>2048"

COUNTS: Final = f"""
SELECT
    (SELECT count() FROM v_inference_log WHERE rollout = '{ROLLOUT}') AS requests,
    (SELECT count() FROM v_pair_scores WHERE rollout = '{ROLLOUT}') AS pairs,
    (SELECT count() FROM v_decisions WHERE rollout = '{ROLLOUT}') AS decisions,
    (SELECT groupArray(kind)
     FROM (SELECT kind FROM v_decisions WHERE rollout = '{ROLLOUT}' ORDER BY off, pos)) AS decided
"""  # noqa: S608 (constants of this program)

WORST: Final = f"""
SELECT s.node AS node,
       multiIf(s.input_tokens > 8192, '>8192', s.input_tokens > 4096, '4097-8192',
               s.input_tokens > 2048, '2049-4096', s.input_tokens > 512, '513-2048', '<=512') AS context,
       r.prompt_id AS prompt,
       count() AS pairs,
       round(avg(s.kl_lower), 4) AS mean_kl,
       round(max(s.kl_lower_max), 2) AS worst_position
FROM v_pair_scores AS s
INNER JOIN v_inference_log AS r ON r.pair_id = s.pair_id AND r.arm = s.arm
WHERE s.rollout = '{ROLLOUT}' AND s.arm = 'canary'
GROUP BY node, context, prompt
ORDER BY mean_kl DESC, pairs DESC, node, prompt
LIMIT 10
"""  # noqa: S608 (constants of this program)


class RouterSeen(Struct, frozen=True):
    """The router at the end."""

    weight_percent: float
    """Of the canary's version."""
    steps: tuple[float, ...]
    """Every weight it has had, in order."""


class Archived(Struct, frozen=True):
    """Rows of the run in ClickHouse."""

    requests: int
    pairs: int
    decisions: int
    decided: tuple[str, ...] = ()
    """The kind of each decision, in order."""


class Result(Struct, frozen=True, kw_only=True):
    """What `klaxon demo --json` prints. Counts are of this run."""

    outcome: Literal["tripped", "no_trip"]
    expected: Literal["tripped", "no_trip"]
    as_expected: bool
    problems: tuple[str, ...]
    """Why the outcome is not the expected one; empty where it is."""
    fault: Fault
    seed: int
    requests: int
    """Arrivals; each is answered by two or three arms."""
    events: int
    """Request events of all arms."""
    pairs: int
    """Pairs of baseline and canary."""
    control_pairs: int
    """Pairs of baseline and control."""
    affected_pairs: int
    directive: Directive | None
    """The router's last one."""
    located: Located | None
    decision_latency_us: int | None
    """From publish() of the deciding event to the router's weight 0."""
    router: RouterSeen
    archive: Archived
    table: tuple[dict[str, Any], ...]
    elapsed_us: int


def problems_of(
    *,
    fault: Fault,
    tripped: Directive | None,
    router: RouterSeen,
    archive: Archived,
    events: int,
    scored: int,
) -> tuple[str, ...]:
    """What differs from what this run had to show; `events`, `scored`: what ClickHouse must hold."""
    found = []
    if archive.requests != events:
        found.append(f"ClickHouse holds {archive.requests} request events, {events} were published")
    if archive.pairs != scored:
        found.append(f"ClickHouse holds {archive.pairs} scored pairs, {scored} were published")
    if fault == "none":
        if tripped is not None:
            found.append(f"tripped without a fault: {cause_line(tripped)}")
        elif len(router.steps) < 2 or max(router.steps) == router.steps[0]:
            found.append("no promotion step was seen; play more --requests")
        return tuple(found)
    if tripped is None:
        found.append("no trip; more --requests give the rule its 100 pairs")
        return tuple(found)
    located = None if tripped.cause is None else tripped.cause.located
    if located is None:
        found.append("the trip names no place")
    elif (located.dimension, located.value) != ("node_context", FAULTY_CELL):
        found.append(f"located at {located.dimension} {located.value}, the fault is at {FAULTY_CELL}")
    if router.weight_percent != 0.0:
        found.append(f"the router still gives {CANARY_VERSION} {router.weight_percent:g} %")
    return tuple(found)


def cause_line(directive: Directive) -> str:
    """Why a directive says what it says, on one line."""
    cause = directive.cause
    if cause is None:
        return "no cause given"
    parts = [cause.rule]
    if cause.capability and cause.capability not in cause.rule:
        parts.append(f"({cause.capability})")
    if cause.metric is not None and cause.value is not None and cause.limit is not None:
        parts.append(f"{cause.metric} {cause.value:.4f} over its limit {cause.limit:g}")
    if cause.samples is not None:
        parts.append(f"on {cause.samples} pairs")
    if cause.scope:
        parts.append(f"in {cause.scope}")
    return " ".join(parts)


def show(result: Result, console: Console) -> None:
    """The run for a person."""

    line = console.print
    line()
    directive = result.directive
    if result.outcome == "tripped" and directive is not None:
        line(f"[bold red]TRIPPED[/]  {cause_line(directive)}")
        if result.located is not None:
            place = result.located
            shares = f"{place.share_of_excess:.0%} of the excess divergence on {place.share_of_traffic:.0%}"
            line(f"located  {place.dimension} [bold]{place.value}[/]: {shares} of the traffic")
    else:
        line("[bold green]no trip[/]")
    weights = " → ".join(f"{weight:g} %" for weight in result.router.steps)
    line(f"router   {CANARY_VERSION}: {weights}")
    if result.decision_latency_us is not None:
        took_ms = result.decision_latency_us / 1000
        line(f"latency  {took_ms:.0f} ms from publish() of the deciding event to the router's weight 0")
    line(f"archive  {_archive_line(result)}")
    line("worst    prompts of the canary, as ClickHouse has them:")
    line(worst_table(result.table))
    expected = "as expected" if result.as_expected else "NOT as expected: " + "; ".join(result.problems)
    damaged = "" if result.fault == "none" else f"{result.affected_pairs} of them damaged by the fault, "
    line(
        f"{counted(result.requests, 'user request')}, {counted(result.pairs, 'canary pair')}, "
        f"{damaged}{result.elapsed_us / 1e6:.0f} s: {expected}"
    )


def _archive_line(result: Result) -> str:
    """What ClickHouse holds, in the parts it is made of."""
    archive = result.archive
    copies = archive.requests - result.requests
    pairs = f"{result.pairs} of the canary"
    if result.control_pairs:
        pairs += f", {result.control_pairs} of the control"
    # The first command that a gate obeys for a roll-out starts it.
    kinds = ["start" if i == 0 and kind == "command" else kind for i, kind in enumerate(archive.decided)]
    decided = f" ({', '.join(kinds)})" if kinds else ""
    return (
        f"{counted(archive.requests, 'request event')} ({result.requests} of users, "
        f"{counted(copies, 'mirrored copy', 'mirrored copies')}), "
        f"{counted(archive.pairs, 'pair')} ({pairs}), {counted(archive.decisions, 'decision')}{decided}"
    )


def worst_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of the query WORST."""
    texts, numbers = ("node", "context", "prompt"), ("pairs", "mean_kl", "worst_position")
    table = Table(*texts, show_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in (*texts, *numbers)))
    return table
