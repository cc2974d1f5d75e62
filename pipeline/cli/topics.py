"""`klaxon topics create | check`: the topics as the configuration wants them."""

from __future__ import annotations

import asyncio
import json

import click

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config
from pipeline.workers import topics as topic_plan
from pipeline.workers.broker import BrokerAwayError, BrokerError, until_reached


@click.group()
def topics() -> None:
    """Create or verify Klaxon's topics.

    Example: klaxon topics create --config klaxon.yaml
    """


@topics.command()
@config_option
@json_option
def create(config: Config, as_json: bool) -> None:
    """Create the topics that do not exist.

    Example: KLAXON_KAFKA_BOOTSTRAP=127.0.0.1:9092 klaxon topics create
    """
    try:
        created = asyncio.run(until_reached(config.kafka, topic_plan.create))
    except BrokerAwayError as error:
        raise CommandError(f"{error}; check kafka.bootstrap", Exit.UNREACHABLE) from None
    except BrokerError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if as_json:
        click.echo(json.dumps({"created": [topic.value for topic in created]}))
        return
    for topic in created:
        click.echo(f"created {topic.value}")
    if not created:
        click.echo("all topics exist; `klaxon topics check` compares them with the configuration")


@topics.command()
@config_option
@json_option
def check(config: Config, as_json: bool) -> int:
    """Compare the topics with the configuration, and probe which record times the broker keeps.

    Exit code 1 when something is not as it must be. Example: klaxon topics check --json
    """
    try:
        problems = asyncio.run(until_reached(config.kafka, topic_plan.check))
    except BrokerAwayError as error:
        raise CommandError(f"{error}; check kafka.bootstrap", Exit.UNREACHABLE) from None
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": list(problems)}))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        if not problems:
            click.echo("all topics are as the configuration says")
    return Exit.BAD if problems else Exit.OK
