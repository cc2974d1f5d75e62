"""`klaxon router`: follow the control topic and print what is applied."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from dataclasses import asdict

import click
import msgspec

from agents.router.runner import Change, Router, RouterSettings
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config


def human_line(change: Change) -> str:
    """One line for a person: what holds now, and why."""
    split = " · ".join(f"{version} {percent:g} %" for version, percent in change.effective.weights.items())
    parts = [
        f"{change.rollout} generation {change.generation} epoch {change.epoch}",
        change.reason.replace("_", " "),
        change.directive.state,
        split,
    ]
    if change.effective.ejected_nodes:
        parts.append("without " + ", ".join(change.effective.ejected_nodes))
    cause = change.directive.cause
    if cause is not None:
        parts.append(f"because of {cause.rule}")
    return " · ".join(parts)


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


@click.command()
@config_option
@json_option
def router(config: Config, as_json: bool) -> None:
    """Follow the control topic: print each change of what this router does, publish it on klaxon.applied.

    With --json one object a line. Runs until it is interrupted.

    \b
    Example:
      klaxon router --config klaxon.yaml
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="klaxon router: %(message)s")
    # Its own lines repeat ours, without the remedy.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    settings = RouterSettings(
        bootstrap=config.kafka.bootstrap,
        name=config.router.name,
        fetch_wait_ms=config.kafka.fetch_wait_ms,
    )

    def tell(change: Change) -> None:
        click.echo(json_line(change) if as_json else human_line(change))
        sys.stdout.flush()

    async def main() -> None:
        stop = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
        await Router(settings, tell).run(stop)

    asyncio.run(main())
