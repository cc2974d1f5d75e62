"""A row of the bench: one measured number and what it must reach. The table, and build/bench.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table


class Row(Struct, frozen=True, kw_only=True):
    """One line of build/bench.json (interface.md)."""

    name: str
    value: float | None
    """None: it could not be measured."""
    unit: str
    floor: float | None = None
    ceiling: float | None = None
    ok: bool


def row(
    name: str, value: float | None, unit: str, *, floor: float | None = None, ceiling: float | None = None
) -> Row:
    """A row, judged: what could not be measured is not ok."""
    ok = value is not None and (floor is None or value >= floor) and (ceiling is None or value <= ceiling)
    return Row(name=name, value=value, unit=unit, floor=floor, ceiling=ceiling, ok=ok)


@dataclass(frozen=True, slots=True)
class Spread:
    """Several rounds of one ratio."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """What is judged."""
        return median(self.values)

    def rows(self, name: str, *, floor: float) -> list[Row]:
        """The median against its floor, and how far the rounds lie apart."""
        return [
            row(name, self.median, "ratio", floor=floor),
            row(f"{name}.lowest", min(self.values), "ratio"),
            row(f"{name}.highest", max(self.values), "ratio"),
        ]


def write(rows: Sequence[Row], path: Path) -> None:
    """build/bench.json: a list of objects, one a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(rows))) + b"\n")


def show(console: Console, rows: Sequence[Row]) -> None:
    """One line a row; what is missed stands out."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "value", "unit", "floor", "ceiling", "ok"):
        table.add_column(title, justify="right" if title in ("value", "floor", "ceiling") else "left")
    for one in rows:
        limited = one.floor is not None or one.ceiling is not None
        ok = ("yes" if limited else "") if one.ok else "[bold red]NO[/]"
        table.add_row(one.name, _number(one.value), one.unit, _number(one.floor), _number(one.ceiling), ok)
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
