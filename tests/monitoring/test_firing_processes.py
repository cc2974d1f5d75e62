"""Alerts about processes: one that restarts, is never ready, or holds too much; a receiver that is silent."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from pipeline.cli.monitored import monitored
from pipeline.config import MonitoringConfig
from pipeline.core.notification import Notification
from pipeline.workers import notify, topics
from pipeline.workers.notify import Sender, Webhook
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.waiting import eventually
from tests.monitoring.firings import FIRED_BY, alerts, answered, assert_fire, cases, seen, total
from tests.monitoring.scraping import address_of
from tests.prometheus.promtool import check_alerts, promtool
from tests.workers.test_notify import receiver

MODULES = tuple(f"test_firing{part}" for part in ("", "_gate", "_stack", "_processes", "_gateway"))
LIMIT_BYTES = 2_147_483_648
LARGE = (
    sys.executable,
    "-c",
    "import mmap, os\n"
    "size, file = 64 << 20, os.memfd_create('large')\n"
    "os.ftruncate(file, size)\n"
    "held = [mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) for _ in range(33)]\n"
    "from pipeline.cli.main import main; main()",
    "worker",
    "measure",
)
"""A worker of over 2 GiB, as the system counts what it holds: 64 MiB of the machine's memory, 33 times."""


def test_every_alert_has_a_real_firing() -> None:
    assert set(FIRED_BY) == set(alerts())
    modules = [importlib.import_module(f"tests.monitoring.{name}") for name in MODULES]
    for test in FIRED_BY.values():
        assert any(hasattr(module, test) for module in modules), test


@pytest.mark.slow
async def test_a_worker_that_restarts_without_its_broker(
    embedded: Broker, log_folder: Path, tmp_path: Path
) -> None:
    promtool()
    await topics.create(embedded.config)
    away = {"KLAXON_KAFKA_BOOTSTRAP": "127.0.0.1:1"}
    async with Worker("measure", embedded, log_folder) as worker:
        at = {"measure": await address_of(worker)}
        film = [await seen(at, lambda now: total(now, "measure", "klaxon_ready") == 1)]
    for command in (None, None, LARGE):
        async with Worker("measure", embedded, log_folder, environment=away, command=command) as worker:
            film.append(await answered({"measure": await address_of(worker)}))
    assert total(film[-1], "measure", "klaxon_resident_bytes") > LIMIT_BYTES
    films = {
        "KlaxonProcessRestarts": film,
        "KlaxonNotReady": film[:2],
        "KlaxonMemory": [film[0], film[-1]],
    }
    assert_fire("test_a_worker_that_restarts_without_its_broker", films, tmp_path)
    # Known-bad: what is not so does not fire, and the check says it.
    for alert, good in {"KlaxonProcessRestarts": film[:3], "KlaxonNotReady": film[:1] * 2}.items():
        assert alert in check_alerts(cases(alert, good), tmp_path)


async def test_a_receiver_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender, its gauges and the endpoint are the process's; its clock alone is moved by hand."""
    promtool()
    ahead_s = 0.0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(notify, "time", clock)
    asked = asyncio.Event()

    def hang(_: int) -> web.StreamResponse | None:
        asked.set()
        return None

    async def listening() -> bool:
        return "metrics at" in caplog.text

    config = MonitoringConfig(notify_port=0)
    async with receiver(hang) as there:
        webhook = Webhook(there.url, (b"k" * 24,), frozenset({"trip"}), timeout_s=600, give_up_s=600)
        async with Sender(webhook) as sender:
            with caplog.at_level("INFO", "klaxon.monitoring"):
                async with monitored(
                    "notify", config, gauges=lambda: {"notify": sender.gauges()}, missing=tuple
                ):
                    await eventually(listening)
                    url = caplog.text.partition("metrics at ")[2].partition("/metrics")[0]
                    film = [await answered({"notify": url})]
                    under_way = asyncio.create_task(
                        sender.deliver(Notification(id="klaxon.decisions/0/7", body=b"{}"))
                    )
                    await asked.wait()
                    ahead_s = 301.0
                    film.append(await answered({"notify": url}))
                    under_way.cancel()
                    await asyncio.wait([under_way])
    assert_fire("test_a_receiver_that_never_answers", {"KlaxonNotificationWaits": film}, tmp_path)
