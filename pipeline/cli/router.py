"""`klaxon router`: follow the control topic and print what is applied."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import click
import msgspec
from aiokafka.errors import KafkaError

from agents.router.directive_file import WatchedFile
from agents.router.runner import Change, Router, RouterSettings
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.monitored import monitored
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config, KafkaConfig
from pipeline.core.visible import visible
from pipeline.errors import PipelineError
from pipeline.monitoring.lines import set_up
from pipeline.signatures import NOT_REQUIRED, trust_for
from pipeline.workers.broker import BrokerError, security_options
from pipeline.workers.rights import denial, explained, lacking_rights
from pipeline.workers.stopping import stopping_within
from schemas.plain import Plain
from schemas.topics import Topic

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
    if change.effective.excluded_segments:
        segments = (f"{one.dimension}={one.value}" for one in change.effective.excluded_segments)
        parts.append("not for " + ", ".join(segments))
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


async def _reason(kafka: KafkaConfig, role: str, error: KafkaError | None) -> str:
    """Why the control topic cannot be followed in this role; None: the broker shows none."""
    if error is not None:
        return await explained(kafka, error)
    with contextlib.suppress(BrokerError):
        if lacking := await lacking_rights(kafka, role):
            return denial(kafka, lacking, role)
    return f"no topic {Topic.CONTROL}: run `klaxon topics create`"


def router_settings(kafka: KafkaConfig, name: str, role: str) -> RouterSettings:
    """Of a router of this name, in this role's rights. Raises RefusedError as `security_options` does."""
    return RouterSettings(
        bootstrap=kafka.bootstrap,
        name=name,
        fetch_wait_ms=IDLE_WAIT_MS if kafka.transactions else kafka.fetch_wait_ms,
        security=security_options(kafka),
        explain=partial(_reason, kafka, role),
    )


def print_change(change: Change, *, as_json: bool) -> None:
    """One line on standard output, at once."""
    click.echo(json_line(change) if as_json else human_line(change))
    sys.stdout.flush()


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

    settings = router_settings(config.kafka, config.router.name, "router")
    tell = partial(print_change, as_json=as_json)
    try:
        trust = trust_for(config.signatures)
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if trust is None:
        logging.getLogger("klaxon.router").warning("%s", Plain(NOT_REQUIRED))

    async def main() -> None:
        with stopping_within(STOP_GRACE_S) as stop:
            following = Router(settings, tell, None if file is None else WatchedFile(file), trust)

            def missing() -> tuple[str, ...]:
                return () if following.caught_up else (f"{Topic.CONTROL.value} was not read to its end yet",)

            async with monitored("router", config.monitoring, gauges=following.gauges, missing=missing):
                await following.run(stop)

    asyncio.run(main())
