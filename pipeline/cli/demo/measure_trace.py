"""Makes the demo's table: `python -m pipeline.cli.demo.measure_trace completion=CODE.csv chat=CONV.csv`.

The Azure LLM inference trace 2023 is in the repository Azure/AzurePublicDataset, data/.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from pipeline.cli.demo.traffic import FIGURES_FILE, Figures, ServiceFigures, quantiles, read_trace

SOURCE = (
    "Azure LLM inference trace 2023 (AzurePublicDataset, code and conversation), CC-BY-4.0; "
    "Patel et al., Splitwise: Efficient generative LLM inference using phase splitting, ISCA 2024"
)


def measure(request_type: str, path: Path) -> ServiceFigures:
    """The figures of one trace file."""
    rows = sorted(read_trace(path), key=lambda arrival: arrival.at_us)
    gaps = [later.at_us - earlier.at_us for earlier, later in pairwise(rows)]
    return ServiceFigures(
        request_type=request_type,
        rows=len(rows),
        mean_gap_us=round(fmean(gaps), 3),
        gap_us=quantiles(gaps),
        input_tokens=quantiles(row.input_tokens for row in rows),
    )


def main(arguments: list[str]) -> None:
    """Measure the files named on the command line and write the table."""
    services = tuple(measure(name, Path(file)) for name, _, file in (a.partition("=") for a in arguments))
    figures = Figures(source=SOURCE, services=services)
    FIGURES_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=0) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
