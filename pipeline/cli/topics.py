"""`klaxon topics create | check`: the topics as the configuration wants them."""

from __future__ import annotations

import asyncio
import json

import click

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config
from pipeline.workers import topics as topic_plan
from pipeline.workers.acls import Acl, acl_problems, create_acls
from pipeline.workers.broker import BrokerAwayError, BrokerError, until_reached


@click.group()
def topics() -> None:
    """Create or verify Klaxon's topics.

    Example: klaxon topics create --config klaxon.yaml
    """


@topics.command()
@config_option
@json_option
@click.option("--acls", is_flag=True, help="Grant the rights of infra/kafka/acls, too.")
def create(config: Config, as_json: bool, acls: bool) -> None:
    """Create the topics that do not exist; with --acls, grant each process its rights, too.

    Run it as a super user of the brokers where they have any. It takes no right from anybody:
    `klaxon topics check --acls` names what is granted over and above.

    \b
    Example: KLAXON_KAFKA_BOOTSTRAP=127.0.0.1:9092 klaxon topics create --acls
    """
    rights: tuple[Acl, ...] = ()
    try:
        created = asyncio.run(until_reached(config.kafka, topic_plan.create))
        if acls:
            rights = asyncio.run(create_acls(config))
    except BrokerAwayError as error:
        raise CommandError(f"{error}; check kafka.bootstrap", Exit.UNREACHABLE) from None
    except BrokerError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if as_json:
        told = {"created": [topic.value for topic in created]}
        click.echo(json.dumps({**told, "granted": list(map(str, rights))} if acls else told))
        return
    for topic in created:
        click.echo(f"created {topic.value}")
    if not created:
        click.echo("all topics exist; `klaxon topics check` compares them with the configuration")
    for right in rights:
        click.echo(f"granted: {right}")
    if acls and not rights:
        click.echo("all rights are granted; `klaxon topics check --acls` compares them with the table")


@topics.command()
@config_option
@json_option
@click.option("--acls", is_flag=True, help="Compare the rights granted with infra/kafka/acls, too.")
def check(config: Config, as_json: bool, acls: bool) -> int:
    """Compare the topics with the configuration, and probe which record times the broker keeps.

    Exit code 1 when something is not as it must be. Example: klaxon topics check --json
    """
    try:
        problems = asyncio.run(until_reached(config.kafka, topic_plan.check))
        if acls:
            problems += tuple(map(str, asyncio.run(acl_problems(config))))
    except BrokerAwayError as error:
        raise CommandError(f"{error}; check kafka.bootstrap", Exit.UNREACHABLE) from None
    except BrokerError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": list(problems)}))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        if not problems:
            click.echo("all topics are as the configuration says")
    return Exit.BAD if problems else Exit.OK
