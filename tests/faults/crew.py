"""Two of one worker, broken one fault after another and kept running in between."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from aiokafka import TopicPartition

from pipeline.workers import archive, gate, measure, pair
from schemas.topics import GATING_PARTITIONS, Topic
from tests.faults.schedule import ANYWHERE, Fault
from tests.faults.schedule import Worker as Kind
from tests.kafka.processes import Worker
from tests.kafka.records import committed_offsets
from tests.kafka.waiting import eventually
from tests.system.findings import Finding
from tests.system.stack import PATIENCE_S, SECOND, Stack, now_us
from tests.system.workload import PARTITIONS

READS: Final[dict[Kind, tuple[Topic, ...]]] = {
    "measure": measure.READS,
    "pair": pair.READS,
    "gate": gate.READS,
    "archive": archive.READS,
}
PER_SOURCE: Final = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY, Topic.PAIRS)
"""Topics that have as many partitions as the sources; the others have one per gating partition."""
FIRES_WITHIN_S: Final = 150.0
"""A fault that has not fired by then is an unfired one."""
QUIET_S: Final = 3.0
"""A worker that has been at work this long has passed what lies on its way there."""
SIGNALS: Final = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "restart": signal.SIGTERM}
ENDS_WITH: Final = {"kill": (137, -signal.SIGKILL), "restart": (0,)}
FENCED: Final = "another gate process has taken over"


@dataclass
class Outcome:
    """What became of a planned fault."""

    fault: Fault
    fired: bool = False
    back_s: float | None = None
    """From the fault until all of the group's partitions were worked on again, whoever holds them: sources
    had closed the second of the fault, gates were caught up, the archive was reading."""
    why: str = ""
    """Why it did not fire, or what went wrong afterwards."""


@dataclass
class Crew:
    """Two seats of one kind of worker; one fault at a time. `start` first."""

    on: Stack
    kind: Kind
    defect: str | None = None
    seats: list[Worker] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """What the faults do not explain."""
    _vacant: int | None = None

    async def start(self) -> None:
        """Start both; `balanced` waits until they are at work."""
        self.seats = [await self._started() for _ in range(2)]

    async def balanced(self) -> None:
        """Wait until both hold something and together everything; who has ended by itself is replaced."""

        async def done() -> bool:
            if self._vacant is not None:
                self.seats[self._vacant] = await self._started()
                self._vacant = None
            await self._replace_ended()
            held = [held_by(worker) for worker in self.seats]
            return all(held) and set().union(*held) == self.everything

        await self._eventually(done, "both at work")

    async def suffer(self, fault: Fault, following: Fault | None) -> Outcome:
        """Let this fault happen, and wait until its worker is back."""
        if self._vacant is not None:
            fault = replace(fault, seat=self._vacant)
        outcome = Outcome(fault)
        try:
            victim = await self._on_its_way(fault)
            await self._until_fired(fault, victim)
            outcome.fired = True
            back = asyncio.create_task(self._back(victim, now_us(), time.monotonic()))
            try:
                leave_vacant = following is not None and following.point.when == "starting"
                await self._aftermath(fault, victim, leave_vacant)
                outcome.back_s = await back
            finally:
                back.cancel()
                await asyncio.wait([back])
        except AssertionError as error:
            outcome.why = str(error).splitlines()[0]
            if outcome.fired:
                self.findings.append(Finding("wrong", f"{fault}: {outcome.why}"))
            self.seats[fault.seat].thaw()
            await self.seats[fault.seat].kill()
            self._vacant = fault.seat
        return outcome

    @property
    def everything(self) -> set[str]:
        """All partitions of the group."""
        return {
            f"{topic.value}/{number}"
            for topic in READS[self.kind]
            for number in range(PARTITIONS if topic in PER_SOURCE else GATING_PARTITIONS)
        }

    async def _started(self, fault: Fault | None = None) -> Worker:
        command = (sys.executable, "-m", "tests.faults.armed", self.kind, str(self.on.folder))
        worker = self.on.worker(
            self.kind,
            fault=fault.armed if fault else None,
            command=(*command, self.defect) if self.defect else command,
        )
        await worker.start()
        return worker

    async def _replace_ended(self, *expected: Worker) -> None:
        """Whoever has ended by itself is replaced; `expected`: whose end is somebody else's to see to."""
        for seat, worker in enumerate(self.seats):
            if not worker.running and worker not in expected:
                self._note_death(worker)
                self.seats[seat] = await self._started()

    def _note_death(self, worker: Worker) -> None:
        """A gate that was away for too long is fenced; nothing else may end a worker."""
        if not was_fenced(worker):
            self.findings.append(Finding("wrong", f"{self.kind} ended by itself: {last_line(worker)}"))

    async def _on_its_way(self, fault: Fault) -> Worker:
        """The victim, with its fault armed."""
        if fault.point.when != "starting":
            await self.balanced()
            victim = self.seats[fault.seat]
            if fault.point.name != ANYWHERE:
                self._arm(victim, fault)
            return victim
        if self._vacant is None:
            await self._end(fault.seat)
        if fault.point.name == "during_warm_up" and self.kind in ("measure", "pair"):
            await self._something_committed()
        self._vacant = None
        self.seats[fault.seat] = victim = await self._started(fault)
        return victim

    def _arm(self, victim: Worker, fault: Fault) -> None:
        (self.on.folder / f"{victim.pid}.armed").write_text(fault.armed)
        victim.send(signal.SIGUSR1)

    async def _end(self, seat: int) -> None:
        """End a seat's worker, as a deployment does."""
        worker = self.seats[seat]
        code = await worker.stop(timeout_s=PATIENCE_S)
        if code != 0:
            self._note_death(worker)

    async def _something_committed(self) -> None:
        """Successors begin inside the log from then on: they have to warm up."""
        places = [
            TopicPartition(topic.value, number) for topic in READS[self.kind] for number in range(PARTITIONS)
        ]

        async def done() -> bool:
            found = await committed_offsets(self.on.broker, f"klaxon-{self.kind}", places)
            return len(found) == len(places) and all(found.values())

        await self._eventually(done, "offsets inside the log committed")

    async def _until_fired(self, fault: Fault, victim: Worker) -> None:
        """Wait for it; where only a change of the group leads there (again), change the group."""
        if fault.point.name == ANYWHERE:
            await asyncio.sleep(fault.after_s)
            victim.send(SIGNALS[fault.action])
            return
        deadline_s = time.monotonic() + FIRES_WITHIN_S
        change_at_s = time.monotonic() if fault.point.when == "rebalancing" else None
        while f"fault {fault.point.name} fired" not in victim.log:
            now_s = time.monotonic()
            assert victim.running, f"{fault}: ended before it: {last_line(victim)}"
            assert now_s < deadline_s, f"{fault}: not within {FIRES_WITHIN_S:g} s"
            if change_at_s is None and fault.point.when == "starting" and self._is_at_work(victim):
                change_at_s = now_s + QUIET_S
            if change_at_s is not None and now_s >= change_at_s:
                change_at_s = None if fault.point.when == "starting" else now_s + 10 * QUIET_S
                await self._end(1 - fault.seat)
                self.seats[1 - fault.seat] = await self._started()
            await asyncio.sleep(0.05)

    def _is_at_work(self, worker: Worker) -> bool:
        held = held_by(worker)
        return bool(held) and held == worked_on_by(worker)

    async def _aftermath(self, fault: Fault, victim: Worker, leave_vacant: bool) -> None:
        """What follows the fault, up to a running process in the seat (or a vacant seat)."""
        if fault.action == "freeze":
            await self._thaw(fault, victim)
            if victim.running:
                return
            self._note_death(victim)
        else:
            code = await victim.until_ended(timeout_s=PATIENCE_S)
            assert code in ENDS_WITH[fault.action] or was_fenced(victim), f"exit code {code}"
        await asyncio.sleep(fault.after_s)
        if leave_vacant:
            self._vacant = fault.seat
        else:
            self.seats[fault.seat] = await self._started()

    async def _thaw(self, fault: Fault, victim: Worker) -> None:
        """Keep it frozen past its session, until the other works on all it held; then let it go on."""
        first = self.seats[1 - fault.seat]
        told = assignments(first)

        async def moved() -> bool:
            peer = self.seats[1 - fault.seat]  # another one, if the first has ended
            # A freeze within the rebalance itself: what the other was told in that one is new, too.
            known = told if peer is first else 0
            new = assignments(peer) > known or fault.point.when in ("starting", "rebalancing")
            return is_frozen(victim) and new and worked_on_by(peer) == self.everything

        await self._eventually(moved, "the other works on everything of the frozen worker")
        await asyncio.sleep(fault.after_s)
        assert is_frozen(victim), "it was not frozen past its session"
        before = assignments(victim)
        victim.thaw()

        async def woken() -> bool:
            return not victim.running or assignments(victim) > before

        await self._eventually(woken, "the thawed worker is back in the group, or fenced")

    async def _back(self, victim: Worker, fired_us: int, fired_s: float) -> float:
        """Seconds from the fault until everything was worked on again."""
        told = assignments(victim)
        second = fired_us // SECOND

        async def done() -> bool:
            # One that was thawed earlier may be found out only now.
            await self._replace_ended(victim)
            if self.kind in ("measure", "pair"):
                closed = self.on.follower.closed
                return all(
                    closed.get((topic.value, number, gating), -1) >= second
                    for topic in READS[self.kind]
                    for number in range(PARTITIONS)
                    for gating in range(GATING_PARTITIONS)
                )
            others = [each for each in self.seats if each is not victim or assignments(each) > told]
            return set().union(*map(worked_on_by, others)) == self.everything

        await self._eventually(done, "worked on again")
        return time.monotonic() - fired_s

    async def _eventually(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            await eventually(condition, timeout_s=PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{self.kind}: {what}: not within {PATIENCE_S:g} s") from None
        except AssertionError as error:
            raise AssertionError(f"{self.kind}: {what}: {error}") from None


def is_frozen(worker: Worker) -> bool:
    """Whether the process is stopped, as SIGSTOP leaves it."""
    if not worker.running:
        return False
    stat = Path(f"/proc/{worker.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def was_fenced(worker: Worker) -> bool:
    """Whether it is a gate that ended because its successor had started."""
    return worker.kind == "gate" and FENCED in worker.log


def last_line(worker: Worker) -> str:
    """The last error it told, else the last thing it said: warnings of libraries come after both."""
    lines = worker.log.strip().splitlines() or ["nothing"]
    return next((line for line in reversed(lines) if " ERROR klaxon." in line), lines[-1])


def assignments(worker: Worker) -> int:
    """How often the group has told it what it holds, by its log."""
    return worker.log.count(f" {worker.kind}: assigned ")


def held_by(worker: Worker) -> set[str]:
    """What the group has told this process that it holds, by its log; nothing once it has ended."""
    held: set[str] = set()
    if worker.running:
        for what, places in re.findall(rf" {worker.kind}: (assigned|revoked) (.*)", worker.log):
            named = set(places.split(", ")) - {"nothing"}
            held = named if what == "assigned" else held - named
    return held


def worked_on_by(worker: Worker) -> set[str]:
    """Of what it holds, what it has caught up with since it was assigned, by its log."""
    held, log = held_by(worker), worker.log
    if worker.kind == "archive":
        # A partition can be opened before the assignment it belongs to is said.
        since = log[max(log.rfind(" archive: revoked "), 0) :]
        return held & set(re.findall(r"(\S+): going on at offset", since))
    if worker.kind == "gate":
        since = log[max(log.rfind(" gate: revoked "), 0) :]
        taken = set(re.findall(r"gating partition (\d+): taken", since))
        return {place for place in held if place.rpartition("/")[2] in taken}
    return held
