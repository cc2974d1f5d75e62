"""One gateway, put together: what listens, what is asked, what publishes; how it begins and how it ends."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import ClientSession, web

from agents.gateway.arrival import Arrivals
from agents.gateway.consent import Consents
from agents.gateway.counts import Counts, Note
from agents.gateway.embedding import Embedder
from agents.gateway.forwarding import Forwarding, Parts
from agents.gateway.known import KnownEngines
from agents.gateway.mirroring import Mirroring
from agents.gateway.protocol import Listener
from agents.gateway.pseudonyms import Pseudonyms
from agents.gateway.recording import Recording
from agents.gateway.refusals import Refusal
from agents.gateway.relaying import mono_us
from agents.gateway.routing import Routing
from agents.gateway.sealing import Sealing
from agents.gateway.segments import TokenEstimates
from agents.gateway.server import Gateway
from agents.gateway.settings import GatewaySettings
from agents.gateway.shadowing import Shadowing
from agents.gateway.signature import PromptSigner
from agents.gateway.spans import Spans
from agents.gateway.upstream import Asking, session
from agents.publish import Publisher
from agents.router.core import Effective
from agents.router.runner import Change
from schemas.events import Arm
from schemas.plain import Log

log: Log = logging.getLogger(__name__)

MIRRORS_END_S: Final = 5.0
"""At the end, how long copies on their way may take, …"""
DRAIN_S: Final = 5.0
"""… and then what waits for Kafka."""
IDLE_CLIENT_S: Final = 75.0
"""How long a user's unused connection is kept."""
BACKLOG: Final = 1_024
ASKED_AT_ONCE: Final = 16
"""Engines, for their facts."""


class ListenError(Exception):
    """The address cannot be listened on; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a gateway signs, hides and seals with."""

    signer: PromptSigner
    pseudonyms: Pseudonyms
    sealing: Sealing | None
    """None: no text leaves, consented or not."""
    consents: Consents
    mirror_authorization: Mapping[Arm, str | None] = field(default_factory=dict, repr=False)
    """`Authorization` of copies, by arm."""
    valid_until_us: Mapping[str, int] = field(default_factory=dict)
    """When each should have been replaced: `signature`, `pseudonym`, `text`."""

    def gauges(self, now_us: int) -> dict[str, int]:
        """How long each is good yet; the gateway goes on with old ones, but seals no text with one."""
        ends = self.valid_until_us.items()
        return {f"{kind}_key_valid_s": max(0, (end_us - now_us) // 1_000_000) for kind, end_us in ends}


class RunningGateway:
    """From `open` to the end of its block. Use from one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        publisher: Publisher,
        spans: Spans,
        embedder: Embedder,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`publisher`: not started yet. `tls`: for engines behind https; None: as the system trusts."""
        self._settings = settings
        self._keys = keys
        self._publisher = publisher
        self._spans = spans
        self._embedder = embedder
        self._tls = tls
        self._counts = Counts()
        self._routing = Routing(
            settings.pools,
            settings.rollout,
            fallback=settings.fallback,
            load_factor=settings.load_factor,
        )
        self._mirroring = Mirroring(settings.mirror)
        self._estimates = TokenEstimates()
        self._gateway: Gateway | None = None
        self._shadowing: Shadowing | None = None
        self._recording: Recording | None = None
        self._engines: KnownEngines | None = None
        self.address: tuple[str, int] | None = None
        """Host and port that it listens on; None: it does not."""

    def obey(self, change: Change) -> None:
        """What the control topic or the directive file says now; of other roll-outs nothing."""
        if change.rollout != self._settings.rollout:
            return
        known: Effective | None = change.effective
        if change.directive is None and not change.effective.aborted:
            known = None  # only the directive file knew of it, and no longer does
        self._routing.obey(known, change.generation)

    def forget(self) -> None:
        """Nobody follows the control topic: as if no directive were known."""
        self._routing.obey(None, None)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen and serve meanwhile. At the end: take no more, let what is under way end, publish the rest.

        Raises ListenError.
        """
        settings = self._settings
        async with AsyncExitStack() as stack:
            users = await stack.enter_async_context(self._asking(settings.connections))
            copies = await stack.enter_async_context(self._asking(settings.mirror.concurrency))
            stack.push_async_callback(self._spans.close)
            stack.push_async_callback(self._embedder.close)
            looking = session(
                most=ASKED_AT_ONCE, connect_s=settings.connect_timeout_s, tls=self._tls, kept=False
            )
            engines = self._engines = self._known(await stack.enter_async_context(looking))
            self._publisher.start()
            stack.push_async_callback(self._publisher.close, DRAIN_S)
            recording = self._recording = self._records(engines)
            stack.push_async_callback(recording.close)
            shadowing = self._shadowing = self._shadows(copies, engines, recording)
            stack.push_async_callback(shadowing.close, MIRRORS_END_S)
            self._gateway = self._serves(users, engines, recording, shadowing)
            await stack.enter_async_context(self._listening(self._gateway))
            await stack.enter_async_context(_meanwhile(_ask_all(engines)))
            yield

    def _known(self, looking: ClientSession) -> KnownEngines:
        authorization = self._keys.mirror_authorization
        told: dict[str, str] = {arm: said for arm, said in authorization.items() if said is not None}
        return KnownEngines(self._settings.pools, looking, mono_us, told)

    def _records(self, engines: KnownEngines) -> Recording:
        return Recording(
            self._settings.rollout,
            self._publisher,
            self._keys.pseudonyms,
            self._keys.sealing,
            self._embedder,
            self._counts,
            facts=engines.of,
            top=self._settings.top,
        )

    def _shadows(self, copies: Asking, engines: KnownEngines, recording: Recording) -> Shadowing:
        return Shadowing(
            copies,
            self._settings.mirror,
            self._mirroring,
            recording,
            self._counts,
            engines,
            credentials=self._keys.mirror_authorization,
            capture_bytes=self._settings.capture_bytes,
            top=self._settings.top,
        )

    def _serves(
        self, users: Asking, engines: KnownEngines, recording: Recording, shadowing: Shadowing
    ) -> Gateway:
        settings, keys = self._settings, self._keys
        parts = Parts(
            settings=settings,
            routing=self._routing,
            mirroring=self._mirroring,
            estimates=self._estimates,
            users=users,
            engines=engines,
            shadowing=shadowing,
            recording=recording,
            spans=self._spans,
            counts=self._counts,
        )
        arrivals = Arrivals(settings.headers, keys.signer, keys.consents, self._estimates, self._counts)
        return Gateway(settings, arrivals, Forwarding(parts), recording, self._counts)

    def _asking(self, most: int) -> Asking:
        def again() -> None:
            self._counts.notes[Note.HUNG_UP] += 1

        connect_s = self._settings.connect_timeout_s
        return Asking(most=most, connect_s=connect_s, tls=self._tls, on_again=again)

    def gauges(self) -> dict[str, Mapping[str, int]]:
        """Sizes and counts by name, by what they belong to."""
        stats = self._publisher.stats()
        own: dict[str, int] = {
            "queued_events": stats.queued_events,
            "queued_bytes": stats.queued_bytes,
            "events_accepted": stats.accepted,
            "events_acknowledged": stats.acknowledged,
            "events_cut": stats.cut,
            "drops_reported": stats.reported,
            "send_retries": stats.retries,
            **self._routing.gauges(),
            **self._mirroring.gauges(),
            **self._estimates.gauges(),
            **self._embedder.gauges(),
            **self._spans.gauges(),
            **self._keys.gauges(time.time_ns() // 1000),
        }
        for part in (self._gateway, self._shadowing, self._recording, self._engines):
            if part is not None:
                own.update(part.gauges())
        return {
            "gateway_routed": _taken(own, "routed_"),
            "gateway_not_mirrored": _taken(own, "not_mirrored_"),
            "gateway": own,
            "gateway_dropped": {str(reason): count for reason, count in stats.dropped.items()},
            **self._counts.gauges(),
        }

    @asynccontextmanager
    async def _listening(self, gateway: Gateway) -> AsyncIterator[None]:
        settings = self._settings
        loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=settings.body_bytes
            )

        def told(refusal: Refusal) -> None:
            self._counts.requests[refusal.counts_as] += 1

        server = Listener(
            gateway.handle,
            told=told,
            request_factory=request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_CLIENT_S,
        )
        runner = web.ServerRunner(server, shutdown_timeout=settings.drain_s)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, settings.listen, settings.port, backlog=BACKLOG).start()
            except OSError as error:
                raise ListenError(
                    f"cannot listen on {settings.listen}:{settings.port}: {error.strerror}; set "
                    "gateway.listen and gateway.port to a free address of this machine"
                ) from None
            host, port, *_ = runner.addresses[0]
            self.address = (host, port)
            yield
        finally:
            await runner.cleanup()
            self.address = None


def _taken(gauges: dict[str, int], prefix: str) -> dict[str, int]:
    """The gauges with this prefix, without it: they are values of one label."""
    names = [name for name in gauges if name.startswith(prefix)]
    return {name.removeprefix(prefix): gauges.pop(name) for name in names}


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work without end beside the block; a defect in it is said, and ends nothing else."""
    task = asyncio.create_task(work)
    task.add_done_callback(_said)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _ask_all(engines: KnownEngines) -> None:
    await engines.read_all()
    await engines.keep()


def _said(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("engines are not asked what they are any more", exc_info=error)
