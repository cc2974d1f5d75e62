"""The cost of scoring beside its yardsticks, as rows."""

from __future__ import annotations

from typing import Final

from tests.bench.kernels import measure_ns
from tests.bench.rows import Row, row

PLAIN_FLOOR: Final = 15.0
MERGED_CEILING: Final = 3.0


def kernel(_quick: bool) -> list[Row]:
    """CPU ns per position, 64 pairs of 128 positions at once: from two records' columns to scores."""
    found = measure_ns()
    ours = found["score_pairs"]
    return [
        row("kernel.score_pairs", ours, "ns/position"),
        row("kernel.score_in_numpy", found["score_in_numpy"], "ns/position"),
        row("kernel.numpy_over_ours", found["score_in_numpy"] / ours, "ratio"),
        row("kernel.measures_alone", found["measure"], "ns/position"),
        row("kernel.merged_bucket", found["merged_bucket"], "ns/position"),
        row("kernel.plain_python", found["plain_python"], "ns/position"),
        row("kernel.plain_python_over_ours", found["plain_python"] / ours, "ratio", floor=PLAIN_FLOOR),
        row("kernel.plain_python_merged_over_ours", found["plain_python_merged"] / ours, "ratio"),
        row("kernel.plain_python_all_over_ours", found["plain_python_all"] / ours, "ratio"),
        row("kernel.ours_over_merged_bucket", ours / found["merged_bucket"], "ratio", ceiling=MERGED_CEILING),
    ]
