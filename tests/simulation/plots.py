"""Plots as SVG, written by hand: no library for three pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 320
LEFT: Final = 60
RIGHT: Final = 170
TOP: Final = 36
BOTTOM: Final = 48
COLOURS: Final = ("#0b6e99", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#5c5c5c")
STROKES: Final = (4.5, 1.6)
"""Of the first line, and of those drawn over it: none hides another."""

Series = Mapping[str, Sequence[tuple[float, float]]]


def lines(title: str, x: str, y: str, series: Series, ticks: Sequence[float] = ()) -> str:
    """A plot with a logarithmic y axis, below whose last decade stands 0. `ticks`: of the x axis."""
    points = [point for line in series.values() for point in line]
    xs = [*(point[0] for point in points), *ticks] or [0.0, 1.0]
    low, high = min(xs), max(xs)
    ys = [point[1] for point in points if point[1] > 0]
    low_y = int(log10(min(ys, default=1.0)) // 1)
    high_y = int(-(-log10(max(ys, default=10.0)) // 1))
    high_y = max(high_y, low_y + 1)
    zero = len(ys) < len(points)
    low_y -= zero

    def at_x(value: float) -> float:
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        level = log10(value) if value > 0 else low_y
        return HEIGHT - BOTTOM - (level - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, title, "start", 14)]
    for decade in range(low_y, high_y + 1):
        height = at_y(10.0**decade)
        parts.append(
            f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            + _text(LEFT - 6, height + 4, "0" if zero and decade == low_y else f"{10.0**decade:g}", "end")
        )
    for tick in ticks:
        parts.append(_text(at_x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x, "middle"))
    parts.append(_text(LEFT, TOP - 4, y, "start"))
    for at, (name, line) in enumerate(series.items()):
        colour = COLOURS[at % len(COLOURS)]
        shown = [(at_x(a), at_y(b)) for a, b in line]
        if shown:
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in shown)
            width = STROKES[at > 0]
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in shown]
        level = TOP + 12 + 18 * at
        left = WIDTH - RIGHT + 12
        parts.append(f'<path d="M{left} {level - 4}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(left + 22, level, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#222">'
        f"{escape(text)}</text>"
    )
