"""What a router tells `klaxon.applied`: each directive that it obeys, renewals too.

Whoever reads them sees which routers keep up. They leave apart from the reading of directives: a topic that
is missing or has no leader holds up none of these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas.control import Applied, Directive
from schemas.control_log import numbers
from schemas.plain import Log, Plain
from schemas.topics import Topic

log: Log = logging.getLogger(__name__)

RETRY_S: Final = 10.0


class Reports:
    """The newest report of every roll-out, until the broker has it: at most one a roll-out."""

    def __init__(self, router: str, retry_s: float = RETRY_S) -> None:
        """`router`: who obeys."""
        self._router = router
        self._retry_s = retry_s
        self._noted: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, Applied] = {}
        self._news = asyncio.Event()

    def note(self, directive: Directive, now_us: int) -> None:
        """This is obeyed from now on; noted once."""
        rollout, number = directive.rollout, numbers(directive)
        if self._noted.get(rollout) == number:
            return
        self._noted[rollout] = number
        self._waiting[rollout] = Applied(
            rollout=rollout,
            router=self._router,
            generation=directive.generation,
            epoch=directive.epoch,
            applied_us=now_us,
        )
        self._news.set()

    def forget(self, rollout: str) -> None:
        """The roll-out is not held any more."""
        self._noted.pop(rollout, None)
        self._waiting.pop(rollout, None)

    async def publish(
        self, producer: AIOKafkaProducer, explain: Callable[[KafkaError], Awaitable[str]]
    ) -> None:
        """Send what waits, without end. What the broker does not take is sent again, and said."""
        while True:
            while self._waiting:
                await self._send(producer, explain)
            self._news.clear()
            await self._news.wait()

    async def _send(
        self, producer: AIOKafkaProducer, explain: Callable[[KafkaError], Awaitable[str]]
    ) -> None:
        sent = list(self._waiting.items())
        try:
            acknowledged = [
                await producer.send(Topic.APPLIED, msgspec.json.encode(applied), key=rollout.encode())
                for rollout, applied in sent
            ]
            await asyncio.gather(*acknowledged)
        except KafkaError as error:
            reason = Plain(await explain(error))
            log.warning("%s takes no reports: %s; next try in %.1f s", Topic.APPLIED, reason, self._retry_s)
            await asyncio.sleep(self._retry_s)
            return
        for rollout, applied in sent:
            if self._waiting.get(rollout) is applied:
                del self._waiting[rollout]
