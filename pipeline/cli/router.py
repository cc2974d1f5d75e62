"""`klaxon router`: follow the control topic and print what is applied."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import msgspec
from aiokafka.errors import KafkaError

from agents.router.directive_file import WatchedFile
from agents.router.runner import Change, Router, RouterSettings
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config, KafkaConfig
from pipeline.core.visible import visible
from pipeline.errors import PipelineError
from pipeline.monitoring.endpoint import Asked, Endpoint
from pipeline.monitoring.exposition import Snapshot
from pipeline.monitoring.lines import set_up
from pipeline.monitoring.process import resident_bytes
from pipeline.signatures import NOT_REQUIRED, trust_for
from pipeline.workers.broker import BrokerError, security_options
from pipeline.workers.rights import denial, explained, lacking_rights
from pipeline.workers.stopping import stopping_within
from schemas.plain import Plain
from schemas.topics import Topic

BEAT_EVERY_S: Final = 0.5
IDLE_WAIT_MS: Final = 500
"""How long a fetch waits for a first record. Apache Kafka answers at once when there is one: a shorter wait
costs it empty answers, of every router. The embedded broker looks again only after `fetch_wait_ms`."""
STOP_GRACE_S: Final = 10.0
"""How long a router may take to end: a broker that does not answer keeps its client waiting."""


def human_line(change: Change) -> str:
    """One line for a person: what holds now, and why."""
    split = " · ".join(f"{version} {percent:g} %" for version, percent in change.effective.weights.items())
    directive = change.directive
    numbers = "" if directive is None else f" generation {change.generation} epoch {change.epoch}"
    parts = [f"{change.rollout}{numbers}", change.reason.replace("_", " ")]
    if directive is not None:
        parts.append(directive.state)
    parts.append(split or "no version is known: none under test gets anything")
    if change.effective.ejected_nodes:
        parts.append("without " + ", ".join(change.effective.ejected_nodes))
    if directive is not None and directive.cause is not None and not change.effective.aborted:
        parts.append(f"because of {directive.cause.rule}")
    return visible(" · ".join(parts))


def json_line(change: Change) -> str:
    """The same as one JSON object."""
    return msgspec.json.encode(
        {
            "rollout": change.rollout,
            "generation": change.generation,
            "epoch": change.epoch,
            "reason": change.reason,
            "changed_us": change.changed_us,
            "effective": asdict(change.effective),
            "directive": change.directive,
        }
    ).decode()


@asynccontextmanager
async def _monitored(following: Router, config: Config) -> AsyncIterator[None]:
    """Answer `/metrics`, `/healthz` and `/readyz` of this router meanwhile."""
    started_us, beat_s = time.time_ns() // 1000, time.monotonic()

    def missing() -> tuple[str, ...]:
        return () if following.caught_up else (f"{Topic.CONTROL.value} was not read to its end yet",)

    def snapshot() -> Snapshot:
        process = {"rss_bytes": resident_bytes(), "started_us": started_us, "ready": int(not missing())}
        return Snapshot({"process": process, **following.gauges()})

    async def beat() -> None:
        nonlocal beat_s
        while True:
            beat_s = time.monotonic()
            await asyncio.sleep(BEAT_EVERY_S)

    beating = asyncio.create_task(beat())
    endpoint = Endpoint(config.monitoring, Asked("router", snapshot, missing, lambda: beat_s))
    endpoint.start()
    try:
        yield
    finally:
        endpoint.stop()
        beating.cancel()


async def _reason(kafka: KafkaConfig, error: KafkaError | None) -> str:
    """Why this router cannot follow the control topic; None: the broker shows none."""
    if error is not None:
        return await explained(kafka, error)
    with contextlib.suppress(BrokerError):
        if lacking := await lacking_rights(kafka, "router"):
            return denial(kafka, lacking, "router")
    return f"no topic {Topic.CONTROL}: run `klaxon topics create`"


@click.command()
@config_option
@json_option
@click.option(
    "--file", "file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Directive file to watch: roll-outs that it aborts get weight 0 here, Kafka or not.",
)  # fmt: skip
def router(config: Config, as_json: bool, file: Path | None) -> None:
    """Follow the control topic: print each change of what this router does, publish it on klaxon.applied.

    With --json one object a line. Runs until it is interrupted. A FILE that does not exist aborts nothing; it
    is looked at five times a second. `klaxon rollout abort ROLLOUT --router FILE` writes it.

    \b
    Example:
      klaxon router --config klaxon.yaml --file /var/lib/klaxon/router.json
    """
    set_up("router", config.logging, typed=(KafkaError,))
    # Its own lines repeat ours, without the remedy.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

    async def explain(error: KafkaError | None) -> str:
        return await _reason(config.kafka, error)

    settings = RouterSettings(
        bootstrap=config.kafka.bootstrap,
        name=config.router.name,
        fetch_wait_ms=IDLE_WAIT_MS if config.kafka.transactions else config.kafka.fetch_wait_ms,
        security=security_options(config.kafka),
        explain=explain,
    )

    def tell(change: Change) -> None:
        click.echo(json_line(change) if as_json else human_line(change))
        sys.stdout.flush()

    try:
        trust = trust_for(config.signatures)
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if trust is None:
        logging.getLogger("klaxon.router").warning("%s", Plain(NOT_REQUIRED))

    async def main() -> None:
        with stopping_within(STOP_GRACE_S) as stop:
            following = Router(settings, tell, None if file is None else WatchedFile(file), trust)
            async with _monitored(following, config):
                await following.run(stop)

    asyncio.run(main())
