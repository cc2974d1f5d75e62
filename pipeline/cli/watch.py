"""`klaxon watch`: follow the control topic, one line per directive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import click
import msgspec
from msgspec.structs import replace

from pipeline.cli.gate_link import believed_directives, follow, newest, require_topics, run
from pipeline.cli.options import config_option, json_option, seconds
from pipeline.cli.standing import cause_line
from pipeline.config import Config, KafkaConfig
from pipeline.core.visible import visible
from pipeline.workers.records import Record
from schemas.control import Directive
from schemas.records import read_json
from schemas.topics import Topic


@click.command()
@config_option
@json_option
@click.option("--rollout", "name", metavar="ROLLOUT", help="Only this one.")
@click.option("--renewals", is_flag=True, help="Also directives that only renew the lease.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many lines.")
@click.option("--for", "for_s", type=float, metavar="SECONDS", callback=seconds, help="Stop after this time.")
def watch(
    config: Config, as_json: bool, name: str | None, renewals: bool, count: int | None, for_s: float | None
) -> None:
    """Follow the control topic: one line per directive, those in force first. Ends with Ctrl-C.

    Records that no trusted key signed are left out; without signatures.trust_file everything is shown.

    Example: klaxon watch --json | jq .weights
    """
    shown = Shown(name, renewals, believed_directives(config))
    run(_watch(config.kafka, shown, as_json, count, for_s))


class Shown:
    """Which directives are told: the first of a roll-out, and whatever changes more than the lease."""

    def __init__(
        self, name: str | None, renewals: bool, believed: Callable[[Record], bool] = lambda _: True
    ) -> None:
        self._believed = believed
        self._name = name
        self._renewals = renewals
        self._last: dict[str, Directive] = {}

    def of(self, record: Record) -> Directive | None:
        """The directive in this record if it is to be told."""
        try:
            directive = read_json(record.value, Directive)
        except msgspec.MsgspecError:
            return None  # a foreign record; the gate overrules it with its next one
        if not self._believed(record):
            return None
        if self._name is not None and directive.rollout != self._name:
            return None
        before = self._last.get(directive.rollout)
        self._last[directive.rollout] = directive
        same = before is not None and _content(before) == _content(directive)
        return None if same and not self._renewals else directive


def _content(directive: Directive) -> Directive:
    return replace(directive, epoch=0, ts_us=0, lease_until_us=0)


def line(directive: Directive, as_json: bool) -> str:
    """One directive for a person, or as one JSON object."""
    if as_json:
        return msgspec.json.encode(directive).decode()
    at = time.strftime("%H:%M:%S", time.localtime(directive.ts_us / 1_000_000))
    split = " · ".join(f"{version} {percent:g} %" for version, percent in directive.weights.items())
    parts = [
        f"{at} {directive.rollout} generation {directive.generation} epoch {directive.epoch}",
        directive.state,
        split,
    ]
    if directive.level == 2:
        parts.append("level 2: roll the image back")
    if directive.cause is not None:
        parts.append(f"because of {cause_line(directive.cause)}")
    return visible(" · ".join(parts))


async def _watch(
    kafka: KafkaConfig, shown: Shown, as_json: bool, count: int | None, for_s: float | None
) -> None:
    await require_topics(kafka, (Topic.CONTROL,))
    current, ends = await newest(kafka, Topic.CONTROL)
    told = 0
    try:
        async with asyncio.timeout(for_s):
            for record in sorted(current.values(), key=lambda one: one.append_us):
                told += _tell(shown, record, as_json)
                if told == count:
                    return
            async for record in follow(kafka, ends):
                told += _tell(shown, record, as_json)
                if told == count:
                    return
    except TimeoutError:
        return


def _tell(shown: Shown, record: Record, as_json: bool) -> int:
    directive = shown.of(record)
    if directive is None:
        return 0
    click.echo(line(directive, as_json))
    return 1
