"""Reading what a running process exposes."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.kafka.processes import Worker


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, whatever the status."""

    status: int
    text: str
    content_type: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def get(url: str, *, timeout_s: float = 10.0) -> Answer:
    """Blocks."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return Answer(reply.status, reply.read().decode(), reply.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


async def address_of(worker: Worker) -> str:
    """`http://host:port` of a worker, from its log."""
    await worker.until_log(": metrics at http://")
    found = re.search(rf"{worker.kind}: metrics at (http://\S+)/metrics", worker.log)
    assert found is not None, worker.log
    return found[1]


async def scrape(address: str) -> str:
    """The text of `/metrics`."""
    answer = await asyncio.to_thread(get, f"{address}/metrics")
    assert answer.status == 200, answer
    return answer.text


def families_of(text: str) -> dict[str, Metric]:
    """By the name that its TYPE line says."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in text_string_to_metric_families(text)
    }


def samples_of(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of every sample of this name."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                yield dict(sample.labels), sample.value
