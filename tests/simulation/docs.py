"""Tables and plots into docs/statistics.md, between the marks that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final

from tests.simulation.plots import lines
from tests.simulation.rows import Delay, Hours
from tests.simulation.tables import Results, days, is_anytime, markdown

PAGE: Final = "statistics.md"
PLOTS: Final = "plots"
_BLOCK: Final = re.compile(r"(<!-- simulated: ([a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_docs(results: Results, drill: str, docs: Path) -> None:
    """Replace what stands between the marks; raises KeyError where the page asks for a table there is not."""
    page = docs / PAGE
    page.write_text(filled(page.read_text(), {**markdown(results), "drill": drill}))
    folder = docs / PLOTS
    folder.mkdir(exist_ok=True)
    for name, picture in pictures(results).items():
        (folder / f"{name}.svg").write_text(picture)


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The page with these tables between their marks."""
    return _BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def pictures(results: Results) -> dict[str, str]:
    """SVGs by file name."""
    return {"delays": _delays(results), "near_the_limit": _near_the_limit(results)}


def _delays(results: Results) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in results.of(Delay):
        if not isinstance(row, Delay) or row.name.startswith("G6") or row.rate != 20:
            continue
        for rule in results.policy.rules:
            seen = [one for one in results.seen(row, rule.id) if one is not None]
            if rule.metric.measure == "kl_lower" and len(seen) * 2 > len(results.outcomes[row.name]):
                kind = "anytime" if is_anytime(rule) else "point"
                name = f"{kind}, " + (f"after {row.fault.onset:,}" if row.fault.onset else "at the start")
                series.setdefault(name, []).append(
                    (row.fault.mean / 0.05, float(median(one.affected for one in seen)))
                )
    return lines(
        "Affected pairs until a trip (median, 20 pairs/s)", "mean over the limit, times", "pairs", series,
        (1.5, 2.0, 2.8, 4.0),
    )  # fmt: skip


def _near_the_limit(results: Results) -> str:
    rows = [
        row for row in results.of(Hours) if isinstance(row, Hours) and row.rate == 20 and row.load is None
    ]
    series = {
        rule.id: [
            (
                row.mean,
                sum(seen.rule == rule.id for outcome in results.outcomes[row.name] for seen in outcome.trips)
                / days(results, row),
            )
            for row in sorted(rows, key=lambda one: one.mean)
        ]
        for rule in results.policy.rules
        if rule.metric.measure == "kl_lower"
    }
    return lines(
        "Trips per day of a healthy canary (20 pairs/s, limit 0.05)", "healthy mean, nats", "trips per day",
        series, tuple(row.mean for row in rows),
    )  # fmt: skip
