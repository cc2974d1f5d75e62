"""Freed memory stays with the process, so that batch after batch uses the same pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAGES = """
import resource, sys
import numpy as np
from pipeline.workers.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("cannot")
    raise SystemExit
for batch in range(12):
    if batch == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [np.ones(1 << 18) for _ in range(8)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
TAKEN = 10 * 8 * (8 << 18) // 4096
"""Pages of ten batches."""


def pages_taken(what: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PAGES, what], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_batches_take_the_same_pages_again() -> None:
    taken = pages_taken("keep")
    if taken == "cannot":
        pytest.skip("this C library's allocator has no such parameters")
    assert int(taken) < TAKEN / 10
    # Known-bad: left alone, the allocator hands every batch back.
    assert int(pages_taken("leave")) > TAKEN / 2
