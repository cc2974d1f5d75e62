"""SIGTERM ends every process within its stated time, whatever is away; a second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from pipeline.cli.publish import STOP_GRACE_S as PUBLISH_GRACE_S
from pipeline.cli.router import STOP_GRACE_S as ROUTER_GRACE_S
from pipeline.config import KafkaConfig
from pipeline.workers import topics
from pipeline.workers.runner import STOP_GRACE_S as WORKER_GRACE_S
from pipeline.workers.watchdog import EXIT_CODE
from schemas.topics import Topic
from tests.kafka.broker import Broker, apache_kafka, broker_of
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import dump
from tests.kafka.waiting import eventually
from tests.workers.events import encoded, request
from tests.workers.fleet import QUICK

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS = ("measure", "pair", "gate", "archive")
LEEWAY_S = 60.0
"""For the interpreter's end on a busy machine. The stated time each process measures itself: if it needs
more it ends with EXIT_CODE, and says so."""


def stated_s(kind: str, broker: Broker) -> float:
    """What docs/operate.md says."""
    worker_s = broker.config.rebalance_timeout_ms / 1000 + WORKER_GRACE_S
    return {"router": ROUTER_GRACE_S, "publish": PUBLISH_GRACE_S}.get(kind, worker_s)


@contextmanager
def hanging_clickhouse() -> Iterator[dict[str, str]]:
    """An address that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield {"KLAXON_CLICKHOUSE_DSN": f"http://127.0.0.1:{server.getsockname()[1]}"}


@asynccontextmanager
async def everything(broker: Broker, folder: Path) -> AsyncIterator[dict[str, Worker]]:
    """All long-running processes; `publish` reads a pipe that stays silent after one event."""
    fifo = folder / "events"
    os.mkfifo(fifo)
    pipe = os.open(fifo, os.O_RDWR)
    commands = {
        "router": (*KLAXON, "router"),
        "publish": (*KLAXON, "publish", "requests", str(fifo)),
    }
    try:
        with hanging_clickhouse() as clickhouse:
            async with AsyncExitStack() as stack:
                made = {}
                for kind in (*WORKERS, *commands):
                    worker = Worker(
                        kind, broker, folder, environment={**QUICK, **clickhouse}, command=commands.get(kind)
                    )
                    made[kind] = await stack.enter_async_context(worker)
                os.write(pipe, encoded(request(1)) + b"\n{half a line")
                yield made
    finally:
        os.close(pipe)


async def ended(worker: Worker, within_s: float) -> tuple[int, float]:
    """SIGTERM it; exit code and seconds."""
    begun_s = time.monotonic()
    code = await worker.stop(timeout_s=within_s + LEEWAY_S)
    assert code == 0 or (code == EXIT_CODE and f"not stopped within {within_s:g} s" in worker.log), worker.log
    return code, time.monotonic() - begun_s


async def test_without_kafka_and_clickhouse_all_end_soon(log_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = broker_of(
            KafkaConfig(bootstrap=f"127.0.0.1:{taken.getsockname()[1]}", rebalance_timeout_ms=6_000)
        )
        async with everything(nowhere, log_folder) as made:
            said = {"router": "next try in", "publish": "waiting for Kafka", "archive": "bring ClickHouse"}
            for kind, worker in made.items():
                await worker.until_log(
                    "cannot reach Kafka" if kind not in said or kind == "archive" else said[kind]
                )
            found = await asyncio.gather(
                *(ended(worker, stated_s(kind, nowhere)) for kind, worker in made.items())
            )
        assert [code for code, _ in found] == [0] * len(made), found
        assert "accepted 0  rejected 0" in made["publish"].log
        assert not any("Traceback" in worker.log for worker in made.values())


async def test_all_end_in_time_while_kafka_hangs_and_a_second_signal_ends_at_once(
    tmp_path: Path, log_folder: Path
) -> None:
    with apache_kafka(tmp_path / "broker") as broker:
        pid = int((tmp_path / "broker" / "broker.pid").read_text())
        await topics.create(broker.config)
        async with everything(broker, log_folder) as made:
            for kind in WORKERS:
                await made[kind].until_log(f"{kind}: ready")

            await eventually(lambda: _is_there(broker))
            os.kill(pid, signal.SIGSTOP)
            try:
                begun_s = time.monotonic()
                once = {kind: made[kind] for kind in ("measure", "archive", "router", "publish")}
                twice = {kind: made[kind] for kind in ("pair", "gate")}
                waits = {
                    kind: asyncio.create_task(ended(one, stated_s(kind, broker)))
                    for kind, one in once.items()
                }
                for one in twice.values():
                    one.send(signal.SIGTERM)
                await asyncio.sleep(0.5)
                hung = [one for one in twice.values() if one.running]
                for one in hung:
                    one.send(signal.SIGINT)
                codes = [await one.until_ended() for one in hung]
                found = {kind: await wait for kind, wait in waits.items()}
            finally:
                os.kill(pid, signal.SIGCONT)
            print(f"ended after {found}, in all {time.monotonic() - begun_s:.1f} s")
    assert hung, "nobody waited for the broker: the second signal was not tried"
    assert codes == [EXIT_CODE] * len(hung)
    assert all("second SIGINT; ending the process" in one.log for one in hung)
    assert found["publish"][0] == 0
    assert "accepted 1  rejected 0" in made["publish"].log


async def _is_there(broker: Broker) -> bool:
    return any(record.value for record in await dump(broker, Topic.REQUESTS))
