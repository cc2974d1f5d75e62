"""Three real Kafka brokers: members can be killed, frozen, restarted, stalled, or given a wrong clock."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from pipeline.config import KafkaConfig
from tests.conftest import required_or_skip
from tests.faults.proxy import Proxy, proxy
from tests.kafka.broker import Broker, broker_of, kafka_sh, none_left
from tests.kafka.waiting import eventually

MEMBERS = 3
SESSION_S = 3.0
"""A broker that gives no sign of life for this long leads nothing any more (kafka.sh; Kafka's own: 9 s)."""
GONE_TIMEOUT_S = 30.0


@dataclass
class Member:
    """One broker. Clients are sent to `client_port`; it listens for what comes from there at `port`."""

    number: int
    folder: Path
    port: int
    client_port: int
    clock: Path | None = None
    """Holds the shift of its wall clock (infra/kafka/clock.c); None: it runs by the machine's."""

    def start(self) -> None:
        """Start it (again), and wait until it serves; blocks."""
        variables = {} if self.clock is None else {"KAFKA_CLOCK": str(self.clock)}
        kafka_sh("start", self.folder, variables)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; blocks."""
        pid = self._pid
        kafka_sh("kill", self.folder)
        deadline_s = time.monotonic() + GONE_TIMEOUT_S
        while _lives(pid):
            assert time.monotonic() < deadline_s, f"broker {self.number} (process {pid}) outlives SIGKILL"
            time.sleep(0.02)

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    def set_clock(self, shift_s: int) -> None:
        """Shift its wall clock against the machine's; it must have been started with a `clock`."""
        assert self.clock is not None
        self.clock.touch()
        with self.clock.open("r+b") as file:  # in place: the broker has it mapped
            file.write(shift_s.to_bytes(8, sys.byteorder, signed=True))

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped or killed."""
        return (self.folder / "broker.pid").exists()

    @property
    def _pid(self) -> int:
        return int((self.folder / "broker.pid").read_text())


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][:1]
    except OSError:
        return False
    return state != "Z"


@dataclass
class Cluster:
    """Its members, and how clients are configured for it; `proxies` while `reachable`, by member number."""

    members: tuple[Member, ...]
    broker: Broker
    proxies: dict[int, Proxy] = field(default_factory=dict)

    def member(self, number: int) -> Member:
        """By its broker id, from 1."""
        return self.members[number - 1]

    async def leader(self, place: tuple[str, int]) -> Member:
        """Who leads a partition; waits for somebody who does."""
        topic, number = place
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.bootstrap)
        await admin.start()

        async def led() -> int:
            try:
                (said,) = await admin.describe_topics([topic])
            except KafkaError as error:  # it asked a member that is down: another one next time
                if not error.retriable:
                    raise
                return 0
            leaders = {each["partition"]: each["leader"] for each in said["partitions"]}
            return max(leaders.get(number, -1), 0)  # -1: nobody

        try:
            return self.member(await eventually(led))
        finally:
            await admin.close()

    @asynccontextmanager
    async def reachable(self) -> AsyncIterator[None]:
        """Clients reach the brokers while the body runs, through a proxy each; those that are down start."""
        async with AsyncExitStack() as exits:
            for member in self.members:
                self.proxies[member.number] = await exits.enter_async_context(
                    proxy(member.client_port, member.port)
                )
            self.heal()
            yield
        self.proxies.clear()

    def heal(self) -> None:
        """Every member runs, by the machine's clock, and answers; blocks while one starts."""
        for each in self.proxies.values():
            each.set("up")
        for member in self.members:
            if member.running:
                member.thaw()
            if member.clock is not None:
                member.set_clock(0)
        down = [member for member in self.members if not member.running]
        with ThreadPoolExecutor(MEMBERS) as pool:
            list(pool.map(Member.start, down))


@contextmanager
def cluster(folder: Path, *, clocks: bool = False) -> Iterator[Cluster]:
    """Three brokers; everything is replicated three times, a write needs two. None is left at the end.

    `clocks`: each under a clock that `Member.set_clock` can shift; see `no_clocks`.
    """
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            required_or_skip(f"{program} is not installed: Apache Kafka's jars need Java 17 and Maven 3.8")
    folder.mkdir(parents=True, exist_ok=True)
    kafka_sh("cluster", folder, arguments=(str(MEMBERS),))
    members = tuple(_member(folder / str(number), number) for number in range(1, MEMBERS + 1))
    config = KafkaConfig(
        bootstrap=",".join(f"127.0.0.1:{member.client_port}" for member in members),
        replication=MEMBERS,
        partitions=2,
        session_timeout_ms=4_000,
        rebalance_timeout_ms=6_000,
    )
    if clocks:
        for member in members:
            member.clock = folder / f"clock-{member.number}"
            member.set_clock(0)
    made = Cluster(members, broker_of(config))
    with none_left(*(member.folder for member in members)):
        made.heal()
        yield made


def _member(folder: Path, number: int) -> Member:
    properties = (folder / "server.properties").read_text()
    listens, told = (
        int(re.search(rf"^{name}=.*CLIENT://127\.0\.0\.1:(\d+)$", properties, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("listeners", r"advertised\.listeners")
    )
    return Member(number, folder, listens, told)


def no_clocks() -> str:
    """Why no broker can be given a wrong clock here; "" if it can."""
    return "" if shutil.which("cc") else "no C compiler (cc), which infra/kafka/clock.c needs"
