"""`klaxon doctor`: look at a whole installation and say what to do about each finding."""

from __future__ import annotations

import asyncio
import os
from typing import TypeVar

import click
import msgspec
from aiokafka.errors import KafkaError

from pipeline.cli.doctor.archive import archive_findings
from pipeline.cli.doctor.broker import FORBIDDEN, broker_findings, not_checked, now_us
from pipeline.cli.doctor.configuration import configuration_findings, installation_findings
from pipeline.cli.doctor.engines import engine_findings, pool_findings
from pipeline.cli.doctor.findings import Finding, by_severity, exit_code, line
from pipeline.cli.doctor.rights import right_findings
from pipeline.cli.doctor.security import security_findings
from pipeline.cli.doctor.workers import worker_findings
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import json_option, seconds
from pipeline.cli.printing import counted
from pipeline.config import Config, ConfigError, load_config
from pipeline.workers.broker import BrokerAwayError

T = TypeVar("T")
NEEDED = ("topic_absent", "kafka_unreachable", "kafka_refused")
"""With one of these, nothing can be said of the workers."""


@click.command()
@click.option("--config", "path", metavar="FILE", help="Configuration file (else KLAXON_CONFIG).")
@json_option
@click.option(
    "--look", "look_s", type=float, default=3.0, show_default=True, callback=seconds, metavar="SECONDS",
    help="Between the two looks at lag, which say whether it grows.",
)  # fmt: skip
@click.option(
    "--engine", "engines", multiple=True, metavar="URL",
    help="An engine to ask for one token with log-probabilities (OpenAI-compatible; may be repeated).",
)  # fmt: skip
def doctor(path: str | None, as_json: bool, look_s: float, engines: tuple[str, ...]) -> int:
    """Check a whole installation: configuration, broker, clocks, topics, workers, leases, routers, archive,
    and engines: those of a configured gateway, and any that are named.

    Each finding says what, where, and what to do; the worst come first. Exit code 0: no error among them
    (there may be warnings), 1: an error, 2: the configuration is wrong, 3: Kafka, ClickHouse or an engine is
    away. It changes nothing; into the input topics it writes an empty record that everybody ignores, to see
    the broker's clock.

    Example: klaxon doctor --config klaxon.yaml --json
    """
    found = by_severity(_look(path, look_s, engines))
    code = exit_code(found)
    if as_json:
        click.echo(msgspec.json.encode({"ok": code is Exit.OK, "findings": found}).decode())
        return code
    for one in found:
        click.echo(line(one))
    errors = sum(one.severity == "error" for one in found)
    others = counted(len(found) - errors, "other finding")
    click.echo(f"{counted(errors, 'error')}, {others}" if found else "nothing to be done")
    return code


def _look(path: str | None, look_s: float, engines: tuple[str, ...]) -> list[Finding]:
    try:
        config = load_config(path, os.environ)
    except ConfigError as error:
        what, _, remedy = str(error).partition("; ")
        wrong = Finding(
            severity="error",
            code="configuration",
            where=path or os.environ.get("KLAXON_CONFIG", "environment"),
            what=what,
            remedy=remedy or "correct it there",
        )
        return [wrong]
    found = [*configuration_findings(config), *installation_findings()]
    found += [*security_findings(config, now_us()), *archive_findings(config)]
    found += asyncio.run(_kafka(config, look_s))
    return [*found, *engine_findings(engines), *pool_findings(config.gateway)]


async def _kafka(config: Config, look_s: float) -> list[Finding]:
    found: list[Finding] = []
    try:
        found += await broker_findings(config.kafka)
        if not any(one.code in NEEDED for one in found):
            found += await right_findings(config)
            found += await worker_findings(config, look_s)
    except CommandError as error:  # a trust file that cannot be read: its own finding says so
        found.append(not_checked(f"Kafka at {config.kafka.bootstrap}", f"the workers: {error}"))
    except BrokerAwayError as error:
        return [_went_away(config, str(error))]
    except FORBIDDEN as error:
        found.append(not_checked(f"Kafka at {config.kafka.bootstrap}", f"the workers: {error!r}"))
    except (KafkaError, OSError) as error:
        return [_went_away(config, repr(error))]
    return found


def _went_away(config: Config, what: str) -> Finding:
    return Finding(
        severity="error",
        code="kafka_unreachable",
        where=f"Kafka at {config.kafka.bootstrap}",
        what=f"while it was asked: {what}",
        remedy="look again; if it stays, see the broker's log",
    )
