"""When requests arrive and how long their prompts are: from measured figures, or from a real trace.

The figures (`azure_2023.json`, made by `python -m pipeline.cli.demo.measure_trace`) were measured on the
Azure LLM inference trace of 2023, CC-BY-4.0: Patel et al., "Splitwise: Efficient generative LLM inference
using phase splitting", ISCA 2024. Gaps are drawn independently of each other from their measured
distribution, so the long correlations of the trace are lost; `--trace` plays a file as it is.
"""

from __future__ import annotations

import csv
import heapq
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from pipeline.cli.demo.errors import DemoError
from schemas.events import Tokens

FIGURES_FILE: Final = Path(__file__).parent / "azure_2023.json"
AZURE_HEADER: Final = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
PROBABILITIES: Final = (*(i / 100 for i in range(100)), 0.995, 0.998, 0.999, 0.9995, 1.0)
"""Where the quantile tables are taken; the last entry is the maximum."""


class TraceError(DemoError):
    """A trace file cannot be used; the message names file, line, field and remedy."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it reaches the gateway; `at_us` counts from the start of the traffic, unscaled."""

    at_us: int
    request_type: str
    input_tokens: int


class ServiceFigures(Struct, frozen=True, kw_only=True):
    """What was measured on one service's trace. Quantiles stand at PROBABILITIES."""

    request_type: str
    rows: int
    mean_gap_us: float
    gap_us: tuple[int, ...]
    input_tokens: tuple[int, ...]


class Figures(Struct, frozen=True, kw_only=True):
    """The compact table: one entry per service, and where it is from."""

    source: str
    services: tuple[ServiceFigures, ...]


def read_figures(path: Path = FIGURES_FILE) -> Figures:
    """The table that ships with the demo. Blocks."""
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def quantiles(values: Iterable[int]) -> tuple[int, ...]:
    """Sample quantiles at PROBABILITIES (the smallest value with at least that share at or below it)."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(p * len(ordered)))] for p in PROBABILITIES)


def _draw(table: Sequence[int], u: float) -> float:
    """The inverse of the measured distribution at `u`, linear between table entries."""
    at = min(bisect_right(PROBABILITIES, u), len(PROBABILITIES) - 1)
    low, high = PROBABILITIES[at - 1], PROBABILITIES[at]
    return table[at - 1] + (table[at] - table[at - 1]) * (u - low) / (high - low)


def _mean_of(table: Sequence[int]) -> float:
    """Mean of what `_draw` gives for uniform `u`."""
    steps = zip(pairwise(PROBABILITIES), pairwise(table), strict=True)
    return sum((high - low) * (a + b) / 2 for (low, high), (a, b) in steps)


def drawn_arrivals(figures: Figures, seed: int) -> Iterator[Arrival]:
    """Endless arrivals of all services together, in order of time; the same seed gives the same ones.

    Gaps are scaled so that each service's mean rate is the measured one."""
    streams = [
        _service(service, random.Random(f"{seed}/{service.request_type}"))  # noqa: S311 (traffic, no secret)
        for service in figures.services
    ]
    return heapq.merge(*streams, key=lambda arrival: arrival.at_us)


def _service(service: ServiceFigures, draw: random.Random) -> Iterator[Arrival]:
    scale = service.mean_gap_us / _mean_of(service.gap_us)
    at_us = 0.0
    while True:
        at_us += _draw(service.gap_us, draw.random()) * scale
        tokens = round(_draw(service.input_tokens, draw.random()))
        yield Arrival(int(at_us), service.request_type, max(1, tokens))


def trace_arrivals(path: Path) -> Iterator[Arrival]:
    """The arrivals of a trace file, played again from its start when it ends. Raises TraceError at once.

    Azure CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) or Mooncake JSON lines (`timestamp` in ms,
    `input_length`)."""
    rows = sorted(read_trace(path), key=lambda arrival: arrival.at_us)
    if not rows:
        raise TraceError(f"{path}: holds no request; name a trace with at least one row")
    first_us = rows[0].at_us
    # One mean gap between the last arrival and the first of the next round.
    span_us = rows[-1].at_us - first_us
    round_us = span_us + max(1, span_us // max(1, len(rows) - 1))

    def endless() -> Iterator[Arrival]:
        start_us = 0
        while True:
            for row in rows:
                yield Arrival(start_us + row.at_us - first_us, row.request_type, row.input_tokens)
            start_us += round_us

    return endless()


def read_trace(path: Path) -> list[Arrival]:
    """Every row of a trace file, in its order; times as in the file. Blocks. Raises TraceError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            start = file.read(1)
            file.seek(0)
            return _read_mooncake(path, file) if start == "{" else _read_azure(path, file)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}; name another with --trace") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not UTF-8 text; a trace is a CSV or a JSON lines file") from None


def _read_azure(path: Path, lines: Iterable[str]) -> list[Arrival]:
    reader = csv.reader(lines)
    header = next(reader, [])
    if header != AZURE_HEADER:
        raise TraceError(
            f"{path}:1: expected the columns {','.join(AZURE_HEADER)}, or JSON lines with timestamp and "
            "input_length"
        )
    rows = []
    for row in reader:
        at = f"{path}:{reader.line_num}"
        if len(row) != len(AZURE_HEADER):
            raise TraceError(
                f"{at}: {len(row)} fields in place of {len(AZURE_HEADER)}; mend or remove the line"
            )
        try:
            at_us = azure_time_us(row[0])
        except ValueError:
            raise TraceError(f"{at}: TIMESTAMP: {row[0]!r} is no time; mend or remove the line") from None
        if not row[1].isdecimal() or int(row[1]) > 2**31 - 1:
            raise TraceError(f"{at}: ContextTokens: {row[1]!r} is no token count; mend or remove the line")
        rows.append(Arrival(at_us, "chat", int(row[1])))
    return rows


def azure_time_us(text: str) -> int:
    """`2023-11-16 18:17:03.9799600` in µs since the epoch; digits beyond the sixth are cut.

    The trace states no zone: read as UTC, since only differences are used. Raises ValueError."""
    whole, _, fraction = text.partition(".")
    if fraction and not fraction.isdecimal():
        raise ValueError(text)
    moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000 + int(fraction[:6].ljust(6, "0"))


class _MooncakeRow(Struct, frozen=True):
    timestamp: Annotated[int, Meta(ge=0, le=10**13)]
    input_length: Tokens


def _read_mooncake(path: Path, lines: Iterable[str]) -> list[Arrival]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_MooncakeRow)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: {error}; mend or remove the line") from None
        rows.append(Arrival(row.timestamp * 1000, "chat", row.input_length))
    return rows
