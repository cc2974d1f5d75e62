"""The golden values of the sequential statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.statistics.betting import Growth, GrowthTable, growth_of_bins


def golden(shared_dir: Path) -> Any:
    return json.loads((shared_dir / "data" / "stats" / "golden.json").read_text())


def close(found: float, expected: float) -> bool:
    """Golden values have ten digits: 1e-8 of them, or of 1 for what is near 0."""
    return abs(found - expected) <= 1e-8 * max(1.0, abs(expected))


def of_counts(table: GrowthTable, counts: Mapping[int, int]) -> Growth:
    """Growth of a bucket by the number of scores in each bin."""
    return growth_of_bins(table, list(counts), list(counts.values()))
