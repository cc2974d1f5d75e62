"""`klaxon gateway`: what users ask instead of an engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
from aiokafka.errors import KafkaError

from agents.gateway.consent import Consents
from agents.gateway.embedding import Embedder, embedder_of
from agents.gateway.pseudonyms import Pseudonyms
from agents.gateway.running import DRAIN_S, MIRRORS_END_S, Keys, ListenError, RunningGateway
from agents.gateway.sealing import Sealing
from agents.gateway.settings import GatewaySettings
from agents.gateway.signature import PromptSigner
from agents.gateway.spans import spans_of
from agents.publish import DeliveryError, KafkaRecordProducer, Publisher, PublisherSettings
from agents.router.directive_file import WatchedFile
from agents.router.runner import Change, Router
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.gateway_check import check_gateway
from pipeline.cli.monitored import monitored
from pipeline.cli.options import gateway_config_option, json_option
from pipeline.cli.router import print_change, router_settings
from pipeline.config import Config, KafkaConfig
from pipeline.errors import PipelineError
from pipeline.monitoring.lines import set_up
from pipeline.secret import Secret, read_secret_file
from pipeline.secret_key_file import KeyKind, SecretKey, read_secret_key
from pipeline.signatures import NOT_REQUIRED, trust_for
from pipeline.tls import client_context
from pipeline.trust_file import WatchedTrust, time_text
from pipeline.workers.broker import BrokerAwayError, BrokerError
from pipeline.workers.rights import denial, lacking_rights
from pipeline.workers.stopping import stopping_within
from schemas.events import Arm
from schemas.plain import Log, Plain
from schemas.signing import Trust

log: Log = logging.getLogger("klaxon.gateway")

END_S: Final = 10.0
"""How long the rest of a gateway's end may take: a broker that does not answer keeps its clients waiting."""
ROUTER_END_S: Final = 5.0
"""Of these, the router's."""
LOOK_EVERY_S: Final = 1.0
WARN_US: Final = 14 * 86_400_000_000
RIGHTS_AGAIN_S: Final = 10.0
AGAIN_S: Final = 5.0
"""From a defect in following the control topic to the next try."""


@click.command()
@gateway_config_option
@json_option
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, path_type=Path), metavar="DIRECTIVE_FILE",
    help="Directive file to watch, in place of gateway.directive_file: roll-outs that it aborts get weight 0 "
    "here, Kafka or not.",
)  # fmt: skip
@click.option(
    "--check", "check", is_flag=True,
    help="Ask every engine for one token, say what of the answers cannot be compared, and end: 0 no error, 1 "
    "an error, 3 an engine is away. With --json one object.",
)  # fmt: skip
def gateway(config: Config, as_json: bool, file: Path | None, check: bool) -> int | None:
    """Answer users by the engines of section `gateway`, mirror, measure, publish.

    Prints each change of what it does, with --json one object a line. Runs until it is interrupted: then it
    takes no more requests and lets those under way end, for gateway.drain_s; a second signal ends it at once.

    \b
    Example:
      klaxon gateway --config klaxon.yaml
      klaxon gateway --config klaxon.yaml --check
    """
    set_up("gateway", config.logging, typed=(KafkaError, DeliveryError))
    # Its own lines repeat ours, without the remedy.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

    settings = config.gateway
    path = file or (None if settings.directive_file is None else Path(settings.directive_file))
    try:
        trust = trust_for(config.signatures)
        consenting = _consent_trust(settings)
        keys = keys_of(settings, consenting)
        tls = None if settings.ca_file is None else client_context(settings.ca_file, None, None, Secret())
        embedder = _embedder(settings, tls)
        router = router_settings(config.kafka, settings.name, "gateway")
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if check:
        return check_gateway(
            settings,
            keys.mirror_authorization,
            embedder,
            tls=tls,
            text_key_until_us=None if keys.sealing is None else keys.sealing.valid_until_us,
            as_json=as_json,
        )
    if trust is None:
        log.warning("%s", Plain(NOT_REQUIRED))
    for told in told_of_keys(keys.valid_until_us, time.time_ns() // 1000):
        log.warning("%s", Plain(told))
    publisher = _publisher(config, router.security)

    async def main() -> None:
        grace_s = settings.drain_s + MIRRORS_END_S + DRAIN_S + END_S
        with stopping_within(grace_s) as stop:
            spans = spans_of(settings.spans, rollout=settings.rollout, gateway=settings.name)
            serving = RunningGateway(settings, keys, publisher, spans, embedder, tls)

            def obey(change: Change) -> None:
                serving.obey(change)
                print_change(change, as_json=as_json)

            directives = Following(
                lambda: Router(router, obey, None if path is None else WatchedFile(path), trust)
            )
            await _serve(config, serving, directives, consenting, keys.valid_until_us, stop)

    try:
        asyncio.run(main())
    except ListenError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    return None


class Following:
    """A router of this process' own. Where one ends by a defect, the next begins, and nothing is known until
    it has read the control topic: the fallback version answers everything meanwhile."""

    def __init__(self, make: Callable[[], Router]) -> None:
        self._make = make
        self.router = make()

    async def run(self, stop: asyncio.Event, forget: Callable[[], None]) -> None:
        """Until `stop`. A router that ends by a defect sets the event that it was given, which is its own."""
        while not stop.is_set():
            own = asyncio.Event()
            running = asyncio.create_task(self.router.run(own))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
            own.set()
            stopping.cancel()
            await asyncio.wait([running, stopping])
            if stop.is_set():
                return
            error = None if running.cancelled() else running.exception()
            log.error("the control topic is not followed; next try in %.1f s", AGAIN_S, exc_info=error)
            forget()
            await asyncio.sleep(AGAIN_S)
            self.router = self._make()


async def _serve(
    config: Config,
    serving: RunningGateway,
    directives: Following,
    consenting: WatchedTrust | None,
    valid_until_us: Mapping[str, int],
    stop: asyncio.Event,
) -> None:
    def missing() -> tuple[str, ...]:
        if stop.is_set():
            return ("it is ending",)
        return () if serving.address is not None else ("it does not listen yet",)

    def gauges() -> dict[str, Mapping[str, int]]:
        return {**serving.gauges(), **directives.router.gauges()}

    beside: list[asyncio.Task[None]] = [
        asyncio.create_task(_until_rights_are_known(config.kafka)),
        asyncio.create_task(_look_at(consenting)),
    ]
    try:
        async with (
            monitored("gateway", config.monitoring, gauges=gauges, missing=missing),
            serving.open(),
        ):
            assert serving.address is not None
            log.info("listening on http://%s:%d", Plain(serving.address[0]), serving.address[1])
            for told in told_at_start(config.gateway, valid_until_us):
                log.info("%s", Plain(told))
            following = asyncio.create_task(directives.run(stop, serving.forget))
            beside.append(following)
            await stop.wait()
            under_way = serving.gauges()["gateway"]["under_way"]
            log.info("no more requests are taken; %d under way may end", under_way)
        # A broker that does not answer keeps its client waiting: users are served to the end before that.
        await asyncio.wait([following], timeout=ROUTER_END_S)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)


async def _until_rights_are_known(kafka: KafkaConfig) -> None:
    """Says once, in one line, which rights are lacking; nothing waits for it."""
    while True:
        try:
            if lacking := await lacking_rights(kafka, "gateway"):
                log.error("%s", Plain(denial(kafka, lacking, "gateway")))
            return
        except BrokerAwayError:
            await asyncio.sleep(RIGHTS_AGAIN_S)
        except BrokerError as error:
            log.error("%s", error)
            return


async def _look_at(trust: WatchedTrust | None) -> None:
    """Take up another file of keys that may sign consents."""
    while trust is not None:
        trust.poll(time.monotonic())
        await asyncio.sleep(LOOK_EVERY_S)


def _consent_trust(settings: GatewaySettings) -> WatchedTrust | None:
    path = settings.privacy.consent_trust_file
    return None if path is None else WatchedTrust(Path(path))


def keys_of(settings: GatewaySettings, consenting: WatchedTrust | None) -> Keys:
    """The keys that the configuration names. Raises PipelineError. Reads their files: blocks."""
    privacy, nobody = settings.privacy, Trust({})
    signing = _key(privacy.signature_key_file, KeyKind.SIGNATURE)
    hiding = _key(privacy.pseudonym_key_file, KeyKind.PSEUDONYM)
    sealing, made = None, [signing, hiding]
    if privacy.text_key_file is not None:
        text = _key(privacy.text_key_file, KeyKind.TEXT)
        sealing = Sealing(text.key, text.key_id, text.valid_until_us)
        made.append(text)
    authorization: dict[Arm, str | None] = {
        pool.arm: read_secret_file(pool.mirror_authorization_file).reveal()
        for pool in settings.pools
        if pool.mirror_authorization_file is not None
    }
    return Keys(
        PromptSigner(signing.key, signing.key_id),
        Pseudonyms(hiding.key, hiding.key_id),
        sealing,
        Consents(lambda: nobody if consenting is None else consenting.trust),
        authorization,
        {key.kind.value: key.valid_until_us for key in made},
    )


def _publisher(config: Config, security: Mapping[str, Any]) -> Publisher:
    settings = config.gateway
    producer = KafkaRecordProducer(
        config.kafka.bootstrap,
        client_id=settings.name,
        idempotent=config.kafka.transactions,
        options=security,
    )
    return Publisher(
        producer,
        PublisherSettings(
            producer_id=f"{settings.name}/{secrets.token_hex(8)}",
            queue_events=settings.producer_queue_events,
            read_back=False,
        ),
    )


def _embedder(settings: GatewaySettings, tls: ssl.SSLContext | None) -> Embedder:
    path = settings.embeddings.authorization_file
    authorization = None if path is None else read_secret_file(path).reveal()
    return embedder_of(settings.embeddings, authorization=authorization, tls=tls)


def told_at_start(settings: GatewaySettings, valid_until_us: Mapping[str, int]) -> Iterator[str]:
    """What this gateway is, a line each: whose directives it obeys, its pools, its mirror, its keys."""
    yield f"obeys roll-out {settings.rollout}, as {settings.name}"
    for pool in settings.pools:
        number = len(pool.engines)
        engines = "1 engine" if number == 1 else f"{number} engines"
        yield f"{pool.arm}: {pool.model_version} on {engines} of kind {pool.kind}"
    mirror = settings.mirror
    if mirror.rate == 0:
        yield "mirrors nothing: gateway.mirror.rate is 0"
    else:
        how = "forced where engines can" if mirror.forced else "free-running"
        yield f"mirrors {mirror.rate:.4g} of requests, {mirror.tokens_per_s} tokens a second at most, {how}"
    ends = ", ".join(f"{kind} by {time_text(until_us)}" for kind, until_us in valid_until_us.items())
    text = "" if KeyKind.TEXT in valid_until_us else "; without a key for texts none leaves"
    yield f"keys are to be replaced: {ends}{text}"


def told_of_keys(valid_until_us: Mapping[str, int], now_us: int) -> Iterator[str]:
    """What is to be said of keys that are past their time, or will be soon."""
    for kind, until_us in valid_until_us.items():
        if until_us - now_us < WARN_US:
            ends = "should have been replaced" if until_us < now_us else "is to be replaced"
            stays = "; no text leaves after that" if kind == KeyKind.TEXT else ""
            yield f"the key for {kind} {ends} by {time_text(until_us)}{stays}: `klaxon keys rotate {kind}`"


def _key(path: str | None, kind: KeyKind) -> SecretKey:
    assert path is not None, "load_gateway_config refuses a gateway without it"
    return read_secret_key(Path(path), kind)
