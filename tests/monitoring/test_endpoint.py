"""The endpoint around a scripted process: what it answers, and what it never does to its process."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from types import SimpleNamespace
from urllib.request import Request, urlopen

import pytest
from msgspec.structs import replace

from pipeline.config import MonitoringConfig
from pipeline.monitoring import endpoint as module
from pipeline.monitoring.endpoint import MOST_CONNECTIONS, SILENT_S, Asked, Endpoint
from pipeline.monitoring.exposition import Snapshot
from tests.monitoring.scraping import Answer, get

FREE = replace(MonitoringConfig(), measure_port=0)


@asynccontextmanager
async def served(
    caplog: pytest.LogCaptureFixture,
    *,
    missing: tuple[str, ...] = (),
    beat_s: Callable[[], float] = time.monotonic,
    snapshot: Callable[[], Snapshot] = lambda: Snapshot({"process": {"rss_bytes": 1}}),
) -> AsyncIterator[str]:
    async with serving(
        caplog, Endpoint(FREE, Asked("measure", snapshot, lambda: missing, beat_s))
    ) as address:
        yield address


@asynccontextmanager
async def serving(caplog: pytest.LogCaptureFixture, endpoint: Endpoint) -> AsyncIterator[str]:
    caplog.set_level(logging.INFO, "klaxon.monitoring")
    endpoint.start()
    try:
        async with asyncio.timeout(60):
            while "metrics at " not in caplog.text:  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0.01)
        yield caplog.text.partition("metrics at ")[2].partition("/metrics")[0]
    finally:
        endpoint.stop()


async def ask(url: str) -> Answer:
    return await asyncio.to_thread(get, url)


async def test_what_is_asked_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with served(caplog) as address:
        assert address.startswith("http://127.0.0.1:")
        metrics, health, ready = [await ask(f"{address}/{path}") for path in ("metrics", "healthz", "readyz")]
        other = await ask(f"{address}/secret-path")
    assert metrics.status == 200
    assert metrics.content_type.startswith("text/plain; version=0.0.4")
    assert "klaxon_resident_bytes 1.0" in metrics.text
    assert (health.status, health.json["healthy"]) == (200, True)
    assert (ready.status, ready.json) == (200, {"ready": True, "missing": []})
    assert (other.status, other.text) == (404, "known here: /metrics /healthz /readyz\n")
    assert "secret-path" not in caplog.text


async def test_what_is_missing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with served(caplog, missing=("klaxon.logits/1: 12 records to catch up",)) as address:
        answer = await ask(f"{address}/readyz")
    assert (answer.status, answer.json["missing"]) == (503, ["klaxon.logits/1: 12 records to catch up"])


@pytest.mark.parametrize(("silent_s", "status"), [(SILENT_S - 0.001, 200), (SILENT_S, 503)])
async def test_a_loop_that_stands_still_is_not_healthy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, silent_s: float, status: int
) -> None:
    """By a clock that stands, however long the answer takes."""
    now_s = 1_000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))
    async with served(caplog, beat_s=lambda: now_s - silent_s) as address:
        assert (await ask(f"{address}/healthz")).status == status


async def test_health_is_told_while_the_loop_is_blocked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known-bad: a server inside the loop could not answer here at all."""
    monkeypatch.setattr(module, "ANSWER_WITHIN_S", 0.05)
    async with served(caplog) as address:
        # Asked from the loop itself, which therefore does not turn meanwhile.
        health, metrics = get(f"{address}/healthz"), get(f"{address}/metrics")
    assert health.status == 200
    assert (metrics.status, metrics.text) == (503, "the event loop does not answer\n")


def test_a_loop_that_has_ended_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known-bad: a coroutine a scrape, which a loop that ends never awaits (warnings are errors)."""
    monkeypatch.setattr(module, "ANSWER_WITHIN_S", 0.05)
    asked: list[str] = []
    scripted = Asked("measure", lambda: Snapshot({}), lambda: (asked.append("x"), ())[1], time.monotonic)
    stopped, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    for loop in (stopped, closed):
        with module._Server("127.0.0.1", 0, scripted, loop, lambda _: None) as server:
            server.timeout = None  # until it is asked, whenever that is
            serving = threading.Thread(target=server.handle_request, daemon=True)
            serving.start()
            answer = get(f"http://127.0.0.1:{server.server_port}/readyz")
            serving.join()
        assert (answer.status, answer.text) == (503, "the event loop does not answer\n")
    stopped.close()
    gc.collect()
    assert asked == []


def _scripted() -> Endpoint:
    counts = Snapshot({"process": {"rss_bytes": 1}})
    return Endpoint(FREE, Asked("measure", lambda: counts, lambda: (), time.monotonic))


async def scrape_noted(endpoint: Endpoint, address: str) -> None:
    """Scrape it; returns when it knows, which may be after its client has the answer."""
    await ask(f"{address}/metrics")
    async with asyncio.timeout(60):
        while endpoint._scraped_s < 0:  # noqa: ASYNC110 (another thread)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("frozen_s", [0, 3600])
async def test_what_was_counted_last_is_scraped_before_the_end(
    caplog: pytest.LogCaptureFixture, frozen_s: int
) -> None:
    """Of a process, too, that stood still, so that nobody could scrape it: a gate is fenced for just that."""
    endpoint = _scripted()
    async with serving(caplog, endpoint) as address:
        await scrape_noted(endpoint, address)
        endpoint._scraped_s -= frozen_s
        ending = asyncio.create_task(endpoint.scraped_since(time.monotonic()))
        await ask(f"{address}/healthz")  # no scrape
        await asyncio.to_thread(urlopen, Request(f"{address}/metrics", method="HEAD"))  # nor this
        await asyncio.sleep(0.2)
        assert not ending.done()
        assert (await ask(f"{address}/metrics")).status == 200
        await asyncio.wait_for(ending, 60)


@pytest.mark.parametrize("scraped_once", [False, True])
async def test_an_end_does_not_wait_for_who_never_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, scraped_once: bool
) -> None:
    """Nobody ever scraped: at once. Somebody did, and has gone since: for a bounded time."""
    endpoint = _scripted()
    async with serving(caplog, endpoint) as address:
        if scraped_once:
            await scrape_noted(endpoint, address)
        monkeypatch.setattr(module, "LAST_SCRAPE_S", 0.1 if scraped_once else 3600.0)
        await asyncio.wait_for(endpoint.scraped_since(time.monotonic()), 60)


async def test_a_defect_costs_a_scrape_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def defect() -> Snapshot:
        raise KeyError("x")

    async with served(caplog, snapshot=defect) as address:
        assert (await ask(f"{address}/metrics")).status == 500
        assert (await ask(f"{address}/healthz")).status == 200
    assert "a scrape cannot be answered" in caplog.text


async def test_a_port_that_is_taken_costs_the_endpoint_until_it_is_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.02)
    caplog.set_level(logging.INFO, "klaxon.monitoring")
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    asked = Asked("measure", lambda: Snapshot({}), lambda: (), time.monotonic)
    endpoint = Endpoint(replace(FREE, measure_port=port), asked)
    endpoint.start()
    try:
        async with asyncio.timeout(60):
            while "cannot be taken" not in caplog.text:  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            taken.close()
            while "metrics at " not in caplog.text:  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0.01)
        assert (await ask(f"http://127.0.0.1:{port}/healthz")).status == 200
    finally:
        endpoint.stop()
        taken.close()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "KLAXON_MONITORING_MEASURE_PORT" in warning.getMessage()


async def test_clients_that_say_nothing_do_not_pile_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first are waited for, and answered when they do say something; the others are closed at once."""
    monkeypatch.setattr(module, "IDLE_S", 3600.0)
    async with served(caplog) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(3 * MOST_CONNECTIONS)]
        try:
            async with asyncio.timeout(60):
                while len(held := [each for each in silent if not _closed(each)]) > MOST_CONNECTIONS:  # noqa: ASYNC110 (another thread)
                    await asyncio.sleep(0.01)
            for each in held:
                each.settimeout(60)
                each.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert [each.recv(12) for each in held] == [b"HTTP/1.0 200"] * MOST_CONNECTIONS
        finally:
            for each in silent:
                each.close()
        async with asyncio.timeout(60):
            while (await asyncio.to_thread(_status, f"{address}/healthz")) != 200:  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0.05)


async def test_clients_that_say_a_byte_now_and_then_are_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known-bad: a time-out for each byte, which eight slow clients stretch for ever."""
    monkeypatch.setattr(module, "IDLE_S", 0.3)
    async with served(caplog) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(MOST_CONNECTIONS)]
        try:
            async with asyncio.timeout(60):
                while (await asyncio.to_thread(_status, f"{address}/healthz")) != 200:
                    for each in slow:
                        with suppress(OSError):
                            each.send(b"G")
                    await asyncio.sleep(0.05)
        finally:
            for each in slow:
                each.close()


def _closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; does not wait."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def _status(url: str) -> int:
    try:
        return get(url).status
    except (OSError, HTTPException):
        return 0


async def test_no_port_means_no_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "klaxon.monitoring")
    asked = Asked("measure", lambda: Snapshot({}), lambda: (), time.monotonic)
    endpoint = Endpoint(replace(FREE, measure_port=None), asked)
    endpoint.start()
    await asyncio.sleep(0.05)
    endpoint.stop()
    assert caplog.text == ""
