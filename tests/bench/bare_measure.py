"""What a hand-written loop for the measure worker's job costs: aiokafka + numpy, no framework.

    bare_measure.py run BROKER TOPIC EVENTS     consume columnar request records from the start

The same records are decoded to the same columns and added up in the same cells, per second and arm: all,
node, nested context classes, request type, hardware, sampling, region, traffic, node × context, stratum; in
each the same counters, sums, extremes and logarithmic histograms. Left out is what a pipeline must add:
validation, duplicates, late events, the bound on cells, several roll-outs, closing, publishing, commits. CPU
is process time between the first tenth of the events and the end, as in the shared `bare.py`. Prints one
JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np
from aiokafka import AIOKafkaConsumer

from schemas.columns import REQUEST_LABELS
from schemas.layout import REQUEST_LAYOUT

ARMS, CELLS, BINS, WINDOWS_KEPT = 3, 512, 1400, 60
PER_LOG = 7 / np.log(1.15)
LIMITS = (512, 2048, 4096, 8192)
MEASURES = ("ttft_us", "itl_us", "duration_us", "input_tokens", "output_tokens")
HISTOGRAMS = ("ttft_us", "itl_us", "duration_us")
USED = ("node", "request_type", "hardware", "region", "error")
WIRE = [(column.name, np.dtype(group.wire)) for group in REQUEST_LAYOUT.groups for column in group.columns]
Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = dict[str, Array]

decode = msgspec.msgpack.Decoder().decode


@dataclass
class Window:
    """One second: every number of every cell of every arm."""

    counts: Array = field(default_factory=lambda: np.zeros((3, ARMS * CELLS), np.int64))
    sums: Array = field(default_factory=lambda: np.zeros((5, ARMS * CELLS), np.int64))
    least: Array = field(default_factory=lambda: np.full((5, ARMS * CELLS), 1 << 62, np.int64))
    greatest: Array = field(default_factory=lambda: np.full((5, ARMS * CELLS), -1, np.int64))
    histograms: Array = field(default_factory=lambda: np.zeros((3, ARMS * CELLS * BINS), np.int32))


class Loop:
    """The whole state."""

    def __init__(self) -> None:
        self.codes: dict[str, dict[str | None, int]] = {name: {} for name in USED}
        self.cells: dict[tuple[str, int], int] = {}
        self.windows: dict[int, Window] = {}

    def columns(self, value: bytes) -> Columns:
        """One record as columns; views, except where one value stands for all."""
        _, _, n, _, _, _, _, _, numbers, labels, _ = decode(value)
        columns: Columns = {}
        for (name, kind), blob in zip(WIRE, numbers, strict=True):
            held = np.frombuffer(blob, kind)
            columns[name] = held if len(held) == n else np.repeat(held, n)
        # A batch without key ids ends before their column.
        for name, (values, blob) in zip(REQUEST_LABELS, labels, strict=False):
            if name in USED:
                known = self.codes[name]
                table = np.array([known.setdefault(text, len(known)) for text in (*values, None)])
                held = np.minimum(np.frombuffer(blob, "<u2"), len(values))
                columns[name] = table[held if len(held) == n else np.repeat(held, n)]
        return columns

    def add(self, values: list[bytes]) -> int:
        """Add the events of some records; returns how many."""
        read = [self.columns(value) for value in values]
        columns = {name: np.concatenate([one[name] for one in read]) for name in read[0]}
        seconds = (columns["ts_us"] + columns["duration_us"]) // 1_000_000
        rows, cells = self.members(columns)
        missing = self.codes["error"].get(None, -1)
        failed = (columns["status"] >= 500) | (columns["error"] != missing)
        counters = np.stack([np.ones(len(seconds), np.int64), failed, columns["ttft_us"] < 0])
        bins = {
            name: np.minimum(np.log(np.maximum(columns[name], 1)) * PER_LOG, BINS - 1).astype(np.int64)
            for name in HISTOGRAMS
        }
        of_row = seconds[rows]
        for second in np.unique(seconds).tolist():
            at = of_row == second
            self.add_second(second, rows[at], cells[at], counters, columns, bins)
        while len(self.windows) > WINDOWS_KEPT:
            del self.windows[next(iter(self.windows))]
        return len(seconds)

    def add_second(
        self,
        second: int,
        rows: Array,
        cells: Array,
        counters: Array,
        columns: Columns,
        bins: Columns,
    ) -> None:
        """Add memberships (row, cell) of one second."""
        window = self.windows.get(second)
        if window is None:
            window = self.windows[second] = Window()
        for at in range(3):
            np.add.at(window.counts[at], cells, counters[at][rows])
        for at, name in enumerate(MEASURES):
            values = columns[name][rows]
            there = values >= 0
            if not there.any():
                continue
            held, values = cells[there], values[there].astype(np.int64)
            np.add.at(window.sums[at], held, values)
            np.minimum.at(window.least[at], held, values)
            np.maximum.at(window.greatest[at], held, values)
            if name in HISTOGRAMS:
                np.add.at(window.histograms[at], held * BINS + bins[name][rows][there], 1)

    def members(self, columns: Columns) -> tuple[Array, Array]:
        """(row, cell) of every membership."""
        n = len(columns["ts_us"])
        tokens, node, arm = columns["input_tokens"], columns["node"], columns["arm"].astype(np.int64)
        sampling = np.where(columns["temperature"] < 0, 2, columns["temperature"] > 0)
        cached = columns["cached_tokens"]
        cache = np.where(cached < 0, 3, np.where(cached == 0, 0, np.where(2 * cached < tokens, 1, 2)))
        context = np.searchsorted(LIMITS, tokens)
        stratum = columns["request_type"]
        for factor, size in ((context, 5), (sampling, 3), (cache, 4), (columns["hardware"], 64)):
            stratum = stratum * size + factor
        parts: list[tuple[str, Array, Array | None]] = [
            ("all", np.zeros(n, np.int64), None),
            ("node", node, None),
        ]
        for limit in LIMITS:
            over = np.flatnonzero(tokens > limit)
            parts += [(f">{limit}", np.zeros(len(over), np.int64), over), (f"node>{limit}", node[over], over)]
        parts += [
            (name, columns[name].astype(np.int64), None)
            for name in ("request_type", "hardware", "region", "shadow")
        ]
        parts += [("sampling", sampling.astype(np.int64), None), ("stratum", stratum, None)]
        every = np.arange(n)
        rows = [every if chosen is None else chosen for _, _, chosen in parts]
        cells = [self.cell_of(name, values) for name, values, _ in parts]
        row = np.concatenate(rows)
        return row, np.concatenate(cells) + CELLS * arm[row]

    def cell_of(self, name: str, values: Array) -> Array:
        """Cell numbers of one dimension's values."""
        if len(values) == 0:
            return values
        table = np.zeros(int(values.max()) + 1, np.int64)
        for value in np.flatnonzero(np.bincount(values)).tolist():
            table[value] = self.cells.setdefault((name, value), len(self.cells))
        if len(self.cells) > CELLS:
            raise SystemExit(f"more than {CELLS} cells")
        numbered: Array = table[values]
        return numbered


async def run(broker: str, topic: str, events: int) -> None:
    """Consume all events and print what they cost."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=broker,
        group_id=f"bare-measure-{os.getpid()}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    loop, seen, mark = Loop(), 0, (0.0, 0)
    deadline_s = time.monotonic() + 300
    while seen < events and time.monotonic() < deadline_s:
        for records in (await consumer.getmany(timeout_ms=200)).values():
            seen += loop.add([record.value for record in records])
            if not mark[1] and seen >= events // 10:
                mark = (time.process_time(), seen)
    spent_s = time.process_time() - mark[0]
    await consumer.stop()
    requests = sum(
        int(window.counts[0].reshape(ARMS, CELLS)[:, loop.cells["all", 0]].sum())
        for window in loop.windows.values()
    )
    said = {"events": seen, "events_per_cpu_s": round((seen - mark[1]) / spent_s), "counted": requests}
    print(json.dumps({**said, "cells": len(loop.cells), "seconds": len(loop.windows)}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", broker, topic, events]:
            asyncio.run(run(broker, topic, int(events)))
        case _:
            sys.exit(__doc__)
