"""Real `klaxon router` processes for the fault suite, and a control topic that is compacted at once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from agents.router.runner import Router, RouterSettings
from pipeline.cli.router import json_line
from schemas.topics import Topic, gating_partition
from tests.conftest import REPOSITORY
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON
from tests.kafka.records import Written, dump, produce
from tests.kafka.waiting import eventually
from tests.workers.events import encoded, start_command

PATIENCE_S: Final = 120.0
FILLER: Final = b"filler"
Line = dict[str, Any]


@dataclass
class RouterSeen:
    """Every line that a router has said, and a way to wait for one."""

    lines: list[Line] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gauges: Callable[[], dict[str, dict[str, int]]] = dict
    """Of a router in this process."""

    def take(self, line: str | bytes) -> None:
        """The next line."""
        self.lines.append(json.loads(line))
        self.changed.set()

    async def read(self, process: asyncio.subprocess.Process) -> None:
        """Until its output ends. What its end has cut short is no line."""
        assert process.stdout is not None
        async for line in process.stdout:
            if line.endswith(b"\n"):
                self.take(line)

    async def until(self, done: Callable[[Line], bool], what: str) -> Line:
        """Wait until its newest line is such a one."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (self.lines and done(self.lines[-1])):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"the router never said: {what}; its last lines: {self.lines[-3:]}"
            ) from None
        return self.lines[-1]

    def weights(self, version: str, since: int = 0) -> list[float]:
        """What it gave this version, line by line."""
        return [line["effective"]["weights"].get(version, 0.0) for line in self.lines[since:]]


@asynccontextmanager
async def router(
    broker: Broker, name: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[RouterSeen]:
    """A `klaxon router --json` from the topic's beginning, gone at the end."""
    settings = {**broker.environment, "KLAXON_ROUTER_NAME": name, **(environment or {})}
    plain = {key: value for key, value in os.environ.items() if not key.startswith("KLAXON_")}
    process = await asyncio.create_subprocess_exec(
        *KLAXON,
        "router",
        "--json",
        *arguments,
        cwd=REPOSITORY,
        env={**plain, **settings},
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    seen = RouterSeen()
    reading = asyncio.create_task(seen.read(process))
    try:
        yield seen
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


@asynccontextmanager
async def router_here(broker: Broker, name: str, *, credulous: bool = False) -> AsyncIterator[RouterSeen]:
    """The same router in this process: it starts at once. `credulous`: it verifies nothing."""
    seen, stop = RouterSeen(), asyncio.Event()
    settings, trust = RouterSettings(broker.bootstrap, name), None if credulous else keys.trusted()
    running = Router(settings, lambda change: seen.take(json_line(change)), None, trust)
    seen.gauges = running.gauges
    task = asyncio.create_task(running.run(stop))
    try:
        yield seen
    finally:
        stop.set()
        await task


@asynccontextmanager
async def compacted_at_once(broker: Broker) -> AsyncIterator[None]:
    """The control topic rolls and compacts whatever it can, all the time; the cleaner does not sleep long."""
    topic = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.compaction.lag.ms": "0",
        "max.compaction.lag.ms": "100",
        "min.cleanable.dirty.ratio": "0.0",
        "delete.retention.ms": "0",
    }
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()

    async def alter(kind: ConfigResourceType, name: str, settings: Mapping[str, str]) -> None:
        for answer in await admin.alter_configs([ConfigResource(kind, name, dict(settings))]):
            assert all(code == 0 for code, *_ in answer.resources), answer

    try:
        await alter(ConfigResourceType.TOPIC, Topic.CONTROL, topic)
        await alter(ConfigResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "100"})
        yield
    finally:
        await alter(ConfigResourceType.BROKER, "1", {})
        await admin.close()


async def tell(broker: Broker, name: str) -> None:
    """An operator's command to roll-out r1, not waited for."""
    command = {**start_command(name), "command": name, "arguments": {}}
    place = gating_partition("r1")
    await produce(broker, [Written(Topic.COMMANDS, encoded(command), key=b"r1", partition=place)])


async def records_of(broker: Broker, rollout: str) -> list[Any]:
    """What stands on the control topic under a roll-out's key, as routers read it."""
    return [record for record in await dump(broker, Topic.CONTROL) if record.key == rollout.encode()]


async def compacted(broker: Broker, rollout: str, through: int) -> None:
    """Force it: wait until no record of the roll-out stands at this offset or below."""
    place = gating_partition(rollout)

    async def gone() -> bool:
        # The segment that is written to is never compacted: another key's record begins the next one.
        await produce(broker, [Written(Topic.CONTROL, b"-", key=FILLER, partition=place)])
        await asyncio.sleep(0.2)
        return all(record.offset > through for record in await records_of(broker, rollout))

    await eventually(gone)
