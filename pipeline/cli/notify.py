"""`klaxon notify`: tell a webhook about trips and gaps."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import click
import msgspec
from aiokafka.errors import KafkaError

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.monitored import monitored
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config, NotifyConfig
from pipeline.core.notification import NotificationError, checked_url, made, secret_of
from pipeline.monitoring.lines import set_up
from pipeline.workers.notify import Answer, Notifier, Sender, Webhook
from pipeline.workers.stopping import stopping_within
from schemas.topics import Topic

STOP_GRACE_S: Final = 10.0


@click.command()
@click.option("--test", is_flag=True, help="Send one test notification, say what came back, and end.")
@config_option
@json_option
def notify(config: Config, as_json: bool, test: bool) -> int:
    """Tell a webhook about decisions: trips and gaps, or the kinds that notify.kinds names.

    Follows klaxon.decisions beside the gate, in nobody's way. Each notification is signed (Standard Webhooks:
    HMAC-SHA-256 over id, time and body), sent at least once, and again with the same webhook-id until it is
    taken. Runs until SIGTERM, which ends it within 10 s.

    With --test: exit code 0 taken, 1 refused, 3 not reached.

    Example: klaxon notify --test --config klaxon.yaml
    """
    try:
        webhook = webhook_of(config.notify)
    except NotificationError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if not test:
        set_up("notify", config.logging, typed=(KafkaError,))
        asyncio.run(_run(config, webhook))
        return Exit.OK
    answer = asyncio.run(_try(webhook))
    if as_json:
        click.echo(msgspec.json.encode({"outcome": answer.judgement, "said": str(answer.said)}).decode())
    else:
        click.echo(f"{webhook.host}: {answer.said}")
    if answer.judgement == "delivered":
        return Exit.OK
    return Exit.BAD if answer.said.startswith("status") else Exit.UNREACHABLE


def webhook_of(settings: NotifyConfig) -> Webhook:
    """As configured. Reads the secret's file: blocks. Raises NotificationError."""
    if not settings.url:
        raise NotificationError("no webhook is configured: set notify.url and notify.secret_file")
    texts = _secrets(settings)
    if not texts:
        raise NotificationError("a webhook is signed: set notify.secret_file (or KLAXON_NOTIFY_SECRET)")
    return Webhook(
        url=checked_url(settings.url.reveal(), allow_http=settings.allow_http),
        keys=tuple(secret_of(text) for text in texts),
        kinds=frozenset(settings.kinds.split(",")),
        timeout_s=settings.timeout_s,
        give_up_s=settings.give_up_s,
    )


def _secrets(settings: NotifyConfig) -> list[str]:
    """One a line: while two are there, each notification carries both signatures."""
    if settings.secret_file is None:
        return settings.secret.reveal().split()
    try:
        return Path(settings.secret_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise NotificationError(f"notify.secret_file {settings.secret_file}: {why}") from None


async def _run(config: Config, webhook: Webhook) -> None:
    with stopping_within(STOP_GRACE_S) as stop:
        async with Sender(webhook) as sender:
            notifier = Notifier(config.kafka, webhook, sender)

            def missing() -> tuple[str, ...]:
                return () if notifier.joined else (f"{Topic.DECISIONS.value}: the group was not joined yet",)

            def gauges() -> dict[str, dict[str, int]]:
                return {"notify": sender.gauges()}

            async with monitored("notify", config.monitoring, gauges=gauges, missing=missing):
                await notifier.run(stop)


async def _try(webhook: Webhook) -> Answer:
    now_us = time.time_ns() // 1000
    async with Sender(webhook) as sender:
        return await sender.attempt(made(f"test/{now_us}", "klaxon.test", {"ts_us": now_us}))
