"""From exchanges to events to the publisher, with what leaves of texts. Never raises at who records."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from agents.gateway.arrival import Arrival
from agents.gateway.capture import Captured
from agents.gateway.consent import Consented
from agents.gateway.counts import Counts, Note
from agents.gateway.embedding import Embedder
from agents.gateway.events import Exchange, NoLogits, logit_event, request_event
from agents.gateway.facts import EngineFacts
from agents.gateway.pseudonyms import Pseudonyms
from agents.gateway.routing import Route
from agents.gateway.sealing import Belongs, Sealing, Spoken
from schemas.events import Arm, EncryptedText, LogitEvent, RequestEvent, Source
from schemas.plain import Log
from schemas.topics import Topic

log: Log = logging.getLogger(__name__)

SAY_EVERY_S: Final = 10.0
MOST_EMBEDDING: Final = 256
"""Events that wait for an embedding at once; further ones go without."""


class Publishing(Protocol):
    """What is needed of `agents.publish.Publisher`."""

    def publish(self, event: RequestEvent | LogitEvent) -> bool:
        """Queue it; never blocks, never raises."""
        ...

    def report_drop(self, topic: Topic, rollout: str, arm: Arm) -> None:
        """Report an event that never came to be."""
        ...


class Recording:
    """Where every exchange of this gateway ends."""

    def __init__(
        self,
        rollout: str,
        publisher: Publishing,
        pseudonyms: Pseudonyms,
        sealing: Sealing | None,
        embedder: Embedder,
        counts: Counts,
        *,
        facts: Callable[[str], EngineFacts | None],
        top: int,
    ) -> None:
        """`sealing` None: no text leaves. `facts`: of a node's engine, as far as known."""
        self._rollout = rollout
        self._publisher = publisher
        self._pseudonyms = pseudonyms
        self._sealing = sealing
        self._embedder = embedder
        self._counts = counts
        self._facts = facts
        self._top = top
        self._embedding: set[asyncio.Task[None]] = set()
        self._said_s = -SAY_EVERY_S

    def exchange(
        self,
        arrival: Arrival,
        route: Route,
        *,
        ts_us: int,
        began_us: int,
        ended_us: int,
        status: int,
        error: str | None,
        captured: Captured,
        shadow: bool,
        arms: tuple[Arm, ...],
        source: Source = "generated",
    ) -> Exchange:
        """What one engine made of a request. `began_us`, `ended_us`: by the monotonic clock."""
        first_us, last_us = captured.first_token_us, captured.last_token_us
        return Exchange(
            rollout=self._rollout,
            route=route,
            asked=arrival.asked,
            signature=arrival.signature,
            signature_key_id=arrival.signature_key_id,
            pair_id=arrival.pair_id,
            ts_us=ts_us,
            duration_us=(ended_us if last_us is None else last_us) - began_us,
            ttft_us=None if first_us is None else first_us - began_us,
            status=status,
            error=error,
            shadow=shadow,
            captured=captured,
            expected_arms=arms,
            source=source,
            session=arrival.session,
            tenant=arrival.tenant,
            stated=arrival.stated,
            facts=self._facts(route.engine.node),
            top=self._top,
        )

    def request(self, exchange: Exchange, consented: Consented | None) -> None:
        """Publish its request event; with its embedding, where that is sampled, once there is one."""
        wanted = (
            exchange.expected_arms
            and exchange.captured is not None
            and exchange.captured.text
            and len(self._embedding) < MOST_EMBEDDING
            and self._embedder.wants(exchange.pair_id, consented=consented is not None)
        )
        if not wanted:
            self._request(exchange, consented, None)
            return
        task = asyncio.get_running_loop().create_task(self._embedded(exchange, consented))
        self._embedding.add(task)
        task.add_done_callback(self._embedding.discard)

    def logits(self, exchange: Exchange) -> None:
        """Publish its logit event. One that cannot be is counted, and missed by `expected_arms`."""
        try:
            event = logit_event(exchange, self._pseudonyms)
        except Exception as error:  # noqa: BLE001  (a defect of ours may cost an event; counted)
            self.defect(error)
            return
        if isinstance(event, NoLogits):
            self._counts.no_logits[event.value] += 1
        else:
            self._publisher.publish(event)

    def lost(self, arms: tuple[Arm, ...]) -> None:
        """A mirrored request was dropped: one pair is lost for each arm that is no baseline."""
        for arm in arms:
            if arm != "baseline":
                self._publisher.report_drop(Topic.LOGITS, self._rollout, arm)

    def defect(self, error: Exception) -> None:
        """Something of ours went wrong, and no user has noticed. Said now and then, counted always."""
        self._counts.notes[Note.UNMEASURED] += 1
        if time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            log.error("an exchange could not be measured; its user was answered", exc_info=error)

    def gauges(self) -> dict[str, int]:
        """What waits here."""
        return {"embeddings_waited_for": len(self._embedding)}

    async def close(self) -> None:
        """Publish what waits for its embedding, without it."""
        for task in tuple(self._embedding):
            task.cancel()
        await asyncio.gather(*self._embedding, return_exceptions=True)

    async def _embedded(self, exchange: Exchange, consented: Consented | None) -> None:
        embedding = None
        try:
            assert exchange.captured is not None
            embedding = await self._embedder.embed(exchange.captured.text)
        finally:
            self._request(exchange, consented, embedding)

    def _request(
        self, exchange: Exchange, consented: Consented | None, embedding: tuple[float, ...] | None
    ) -> None:
        try:
            sealed = None if consented is None else self._sealed(exchange, consented)
            consent_id = None if sealed is None or consented is None else consented.consent_id
            self._publisher.publish(request_event(exchange, sealed, consent_id, embedding))
        except Exception as error:  # noqa: BLE001  (a defect of ours may cost an event; counted)
            self.defect(error)

    def _sealed(self, exchange: Exchange, consented: Consented) -> EncryptedText | None:
        if self._sealing is None:
            self._counts.texts["no_key"] += 1
            return None
        answer = "" if exchange.captured is None else exchange.captured.text
        belongs = Belongs(consented.consent_id, exchange.pair_id, exchange.signature)
        said = Spoken(tuple(exchange.asked.texts), answer)
        sealed = self._sealing.seal(said, belongs, time.time_ns() // 1000)
        self._counts.texts["key_expired" if sealed is None else "sealed"] += 1
        return sealed
