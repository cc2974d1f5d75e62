"""The webhook: a receiver that fails in every way, and a notifier killed between sending and commit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.notify import notify, webhook_of
from pipeline.config import NotifyConfig
from pipeline.core.notification import Notification, signature
from pipeline.secret import Secret
from pipeline.workers.notify import Sender, Webhook
from schemas.control import Decision, Inputs
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import Written, produce
from tests.kafka.waiting import eventually
from tests.listening import listening

KEY = b"k" * 24
SECRET = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tr"
MESSAGE = Notification(id="klaxon.decisions/0/7", body=b'{"type":"klaxon.trip"}')
Plan = Callable[[int], web.StreamResponse | None]
"""Number of the request (from 0) → the answer; None: there is none."""


class Receiver:
    """Keeps what it is sent."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.elsewhere = 0
        self.url = ""

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.got]

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.got.append(
            ({name.lower(): value for name, value in request.headers.items()}, await request.read())
        )
        answer = self.plan(len(self.got) - 1)
        if answer is None:
            await asyncio.Event().wait()
        assert answer is not None
        return answer

    async def take_elsewhere(self, _: web.Request) -> web.StreamResponse:
        self.elsewhere += 1
        return web.Response()


@asynccontextmanager
async def receiver(plan: Plan) -> AsyncIterator[Receiver]:
    made = Receiver(plan)
    app = web.Application()
    app.router.add_post("/hook", made.take)
    app.router.add_route("*", "/elsewhere", made.take_elsewhere)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made.url = f"http://127.0.0.1:{port}/hook"
    try:
        yield made
    finally:
        await runner.cleanup()


def answers(*statuses: int, **headers: str) -> Plan:
    """These statuses one after the other, then the last again."""
    return lambda number: web.Response(status=statuses[min(number, len(statuses) - 1)], headers=headers)


async def delivered(url: str, *, timeout_s: float = 120, give_up_s: float = 60) -> tuple[Sender, list[float]]:
    """Deliver one; how often each thing happened, and the waits, which take no time here."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    webhook = Webhook(
        url=url, keys=(KEY,), kinds=frozenset({"trip"}), timeout_s=timeout_s, give_up_s=give_up_s
    )
    async with Sender(webhook, sleep=sleep) as sender:
        await sender.deliver(MESSAGE)
    return sender, waits


async def test_it_is_signed_and_taken() -> None:
    async with receiver(answers(204)) as there:
        sender, waits = await delivered(there.url)
    ((headers, body),) = there.got
    assert body == MESSAGE.body
    assert headers["webhook-id"] == MESSAGE.id
    assert headers["webhook-signature"] == signature(MESSAGE, int(headers["webhook-timestamp"]), KEY)
    assert (sender.counts["delivered"], waits) == (1, [])


async def test_errors_are_tried_again_with_the_same_id() -> None:
    async with receiver(answers(500, 503, 429, 401, 200)) as there:
        sender, waits = await delivered(there.url)
    assert there.ids == [MESSAGE.id] * 5
    assert (sender.counts["retried"], sender.counts["delivered"]) == (4, 1)
    assert waits == sorted(waits)


async def test_a_wait_is_measured_until_it_is_over() -> None:
    waited: list[dict[str, int]] = []

    async def sleep(_: float) -> None:
        waited.append(sender.gauges())

    async with receiver(answers(500, 500, 200)) as there:
        webhook = Webhook(there.url, (KEY,), frozenset({"trip"}), timeout_s=120, give_up_s=60)
        async with Sender(webhook, sleep=sleep) as sender:
            assert sender.gauges()["wait_us"] == 0
            await sender.deliver(MESSAGE)
    first, second = waited
    assert 0 < first["wait_us"] < second["wait_us"]
    assert sender.gauges() == {"delivered": 1, "retried": 2, "refused": 0, "given_up": 0, "wait_us": 0}


async def test_what_it_will_never_take_is_left_out() -> None:
    async with receiver(answers(422)) as there:
        sender, waits = await delivered(there.url)
    assert (len(there.got), sender.counts["refused"], waits) == (1, 1, [])


async def test_it_is_given_up_after_a_while() -> None:
    async with receiver(answers(500)) as there:
        sender, waits = await delivered(there.url, give_up_s=20)
    assert sender.counts["given_up"] == 1
    assert sum(waits) <= 20
    assert len(there.got) == len(waits) + 1 < 8


async def test_a_receiver_may_ask_for_time() -> None:
    async with receiver(answers(429, 200, **{"retry-after": "17"})) as there:
        _, waits = await delivered(there.url)
    assert waits == [17]


async def test_redirects_are_not_followed() -> None:
    def plan(number: int) -> web.Response:
        return web.Response(status=307 if number else 302, headers={"location": "/elsewhere"})

    async with receiver(plan) as there:
        sender, _ = await delivered(there.url, give_up_s=3)
    assert (there.elsewhere, sender.counts["given_up"]) == (0, 1)
    assert len(there.got) > 1


async def test_a_receiver_that_hangs_is_left_in_time() -> None:
    async with receiver(lambda number: None if number == 0 else web.Response()) as there:
        sender, _ = await delivered(there.url, timeout_s=0.2)
    # More than one may not have come in time: the next is sent all the same.
    assert sender.counts["retried"] >= 1
    assert sender.counts["delivered"] == 1
    assert len(there.got) >= 2


async def test_an_answer_that_drips_is_left_in_time() -> None:
    """A byte now and then is no answer."""

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 100:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with listening(drip) as port:
        sender, _ = await delivered(f"http://127.0.0.1:{port}/", timeout_s=0.3, give_up_s=0.5)
    assert sender.counts["given_up"] == 1


async def test_nobody_there() -> None:
    sender, waits = await delivered("http://127.0.0.1:1/hook", give_up_s=10)
    assert (sender.counts["given_up"], len(waits) > 1) == (1, True)


def test_secrets_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n{SECRET}\n")
    from_file = webhook_of(NotifyConfig(url=Secret("https://h/x"), secret_file=str(file)))
    assert len(from_file.keys) == 2
    assert (
        webhook_of(NotifyConfig(url=Secret("https://h/x"), secret=Secret(SECRET))).keys == from_file.keys[:1]
    )
    assert from_file.host == "h"
    config = NotifyConfig(url=Secret("https://user:pass@h:1/x"), secret=Secret(SECRET))
    webhook = webhook_of(config)
    assert webhook.host == "h:1"
    for shown in (repr(config), repr(webhook)):
        assert not [word for word in ("pass@", SECRET, repr(webhook.keys[0])) if word in shown]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "no webhook is configured"),
        ({"URL": "https://h/x"}, "a webhook is signed"),
        ({"URL": "https://h/x", "SECRET_FILE": "/nowhere"}, "notify.secret_file /nowhere: No such file"),
        ({"URL": "http://h.example/x", "SECRET": SECRET}, "notify.allow_http"),
        ({"URL": "https://h/x", "SECRET": "plain"}, "begins with whsec_"),
        ({"URL": "https://h/x", "SECRET": "whsec_ä"}, "and base64; this one is not"),
        ({"URL": "https://h/x", "KINDS": "trip,gasp"}, "KLAXON_NOTIFY_KINDS"),
    ],
)
def test_configurations_that_are_refused(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"KLAXON_NOTIFY_{name}", value)
    result = CliRunner().invoke(notify, [])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code is Exit.USAGE
    assert words in str(result.exception)


@pytest.mark.parametrize(
    ("status", "code"), [(200, Exit.OK), (302, Exit.BAD), (404, Exit.BAD), (500, Exit.BAD)]
)
async def test_a_test_says_what_came_back(status: int, code: Exit, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiver(answers(status)) as there:
        monkeypatch.setenv("KLAXON_NOTIFY_URL", there.url)
        monkeypatch.setenv("KLAXON_NOTIFY_SECRET", SECRET)
        result = await asyncio.to_thread(
            CliRunner().invoke, notify, ["--test", "--json"], standalone_mode=False
        )
    assert result.return_value is code
    assert json.loads(result.stdout)["said"] == f"status {status}"
    assert json.loads(there.got[0][1])["type"] == "klaxon.test"


def decision(kind: str) -> bytes:
    inputs = Inputs(offsets={}, command_offset=0, complete_through=1, now_us=1)
    return msgspec.json.encode(Decision(kind=kind, directive=None, inputs=inputs, reason="it happened"))  # type: ignore[arg-type]


async def happens(broker: Broker, *kinds: str) -> None:
    await produce(
        broker, [Written(Topic.DECISIONS, decision(kind), key=b"r1", partition=0) for kind in kinds]
    )


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_trips_and_gaps_are_told_at_least_once(kafka: Broker, log_folder: Path) -> None:
    await happens(kafka, "trip")  # before anybody listened: nobody is told
    hanging = False

    def plan(_: int) -> web.Response | None:
        return None if hanging else web.Response()

    async with receiver(plan) as there:
        # A receiver that hangs is not left before its notifier is stopped.
        environment = {
            "KLAXON_NOTIFY_URL": there.url,
            "KLAXON_NOTIFY_SECRET": SECRET,
            "KLAXON_NOTIFY_TIMEOUT_S": "120",
        }

        def notifier(fault: str | None = None) -> Worker:
            command = (*KLAXON, "notify")
            return Worker("notify", kafka, log_folder, environment=environment, command=command, fault=fault)

        async def got(count: int) -> None:
            async def enough() -> bool:
                return len(there.got) >= count

            await eventually(enough)

        async with notifier("notify_sent_before_commit:2") as first:
            await first.until_log("begins at the end")
            await happens(kafka, "step", "trip", "hold", "gap", "trip")
            await first.until_fault("notify_sent_before_commit")
        await got(2)
        assert there.ids == ["klaxon.decisions/0/2", "klaxon.decisions/0/4"]
        async with notifier() as second:
            await got(4)
            assert there.ids[2:] == ["klaxon.decisions/0/4", "klaxon.decisions/0/5"]
            assert there.got[1][1] == there.got[2][1], "the same, sent again"
            hanging = True
            await happens(kafka, "trip")
            await got(5)
            # 0: by itself, and before its time is up, which it measures itself.
            assert await second.stop() == 0, second.log
        hanging = False
        async with notifier() as third:
            await got(6)
            assert there.ids[4:] == ["klaxon.decisions/0/6"] * 2
            await third.until_log("delivered to 127.0.0.1")
            said: Any = third.log
    assert SECRET not in said
    assert "/hook" not in said
