"""Where a measurement was made: machine and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from tests.conftest import REPOSITORY

PACKAGES = ("numpy", "faust-streaming", "aiokafka", "clickhouse-connect")


def describe() -> dict[str, str]:
    """Name → text, in the order in which it is printed."""
    one, five, fifteen = os.getloadavg()
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "load average": f"{one:.1f} {five:.1f} {fifteen:.1f}",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "Kafka": _kafka(),
        "ClickHouse": importlib.metadata.version("chdb-core") + " (chDB, in process)",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _kafka() -> str:
    pom = (REPOSITORY / "infra" / "kafka" / "pom.xml").read_text(encoding="utf-8")
    return "Apache " + pom.partition("<kafka.version>")[2].partition("<")[0]
