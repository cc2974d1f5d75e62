"""Clients of aiokafka are closed however their use ends."""

from __future__ import annotations

import asyncio
import functools
import gc
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.transaction import InitProducerIdRequest

from agents.publish.kafka import KafkaRecordProducer
from pipeline.cli.doctor.broker import _transactions
from pipeline.config import KafkaConfig
from pipeline.workers.broker import RangeReader, admin_client, client_options, security_options, started
from pipeline.workers.gate_watch import ControlWatch
from pipeline.workers.gate_writer import GateWriter
from pipeline.workers.notify import Notifier, Sender, Webhook
from pipeline.workers.refusal import refusal
from schemas.whole import whole
from tests.kafka.broker import Broker
from tests.listening import listening

KINDS = [AIOKafkaConsumer, AIOKafkaProducer]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_refused(kind: type, nowhere: str) -> None:
    made = kind(bootstrap_servers=nowhere)
    with pytest.raises(KafkaConnectionError):
        async with started(made):
            pytest.fail("it cannot be connected")
    assert made._closed


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_cancelled_while_it_connects(kind: type) -> None:
    came = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()

    async with listening(silent) as port:
        made = kind(bootstrap_servers=f"127.0.0.1:{port}")

        async def use() -> None:
            async with started(made):
                pytest.fail("it cannot be connected")

        using = asyncio.create_task(use())
        await came.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
    assert made._closed


async def _left_open(
    use: Callable[[], Awaitable[object]], cancelling: Callable[[], None] = lambda: None
) -> tuple[int, list[str]]:
    """The turns of the loop that a use takes, and what is open after one that is cancelled in any of them."""
    found: list[str] = []
    gc.collect()
    gc.freeze()  # each collection then looks at what the use made, not at all that is imported
    try:
        for turn in range(1000):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", ResourceWarning)
                using = asyncio.ensure_future(use())
                for _ in range(turn):
                    # The later ones wait for the broker, which may be slow.
                    await asyncio.sleep(0 if turn < 60 else 0.0005 if turn < 500 else 0.02)
                ended = using.done()
                cancelling()
                using.cancel()
                await asyncio.wait([using])
                del using
                gc.collect()
                found += [f"turn {turn}: {str(one.message)[:60]}" for one in said]
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            found += [f"turn {turn}: {task.get_coro()}" for task in tasks]
            if ended:
                return turn, found
    finally:
        gc.unfreeze()
    raise AssertionError("it never ended")


class _Briefly(Notifier):
    """Ends as soon as it follows the topic, in no group: a member waits until it has joined to leave."""

    def __init__(self, kafka: KafkaConfig) -> None:
        self.stop = asyncio.Event()
        webhook = Webhook(url="http://127.0.0.1:1/", keys=(), kinds=frozenset(), timeout_s=1, give_up_s=1)
        super().__init__(kafka, webhook, Sender(webhook))

    def _consumer(self) -> AIOKafkaConsumer[bytes, bytes]:
        return AIOKafkaConsumer(**client_options(self._kafka))

    async def _follow(self, consumer: object) -> None:
        self.stop.set()


async def _read(kafka: KafkaConfig) -> None:
    reader = RangeReader(kafka)
    await reader.start()
    await reader.stop()


async def _watch(kafka: KafkaConfig) -> None:
    watch = ControlWatch(kafka, 0)
    try:
        await watch.start(0)
    finally:
        await watch.stop()


async def _write(kafka: KafkaConfig) -> None:
    writer = GateWriter(kafka, 0)
    try:
        await writer.start()
    finally:
        await writer.close()


async def _notify(kafka: KafkaConfig) -> None:
    notifier = _Briefly(kafka)
    await notifier.run(notifier.stop)


async def _administer(kafka: KafkaConfig) -> None:
    async with admin_client(kafka) as admin:
        await admin.list_topics()


async def _publish(kafka: KafkaConfig) -> None:
    producer = KafkaRecordProducer(kafka.bootstrap)
    await producer.start()
    await producer.stop()


async def _ask_who_refuses(kafka: KafkaConfig) -> None:
    assert await refusal(kafka.bootstrap, security_options(kafka)) is None


async def _produce(kafka: KafkaConfig) -> None:
    async with started(AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)):
        pass


async def _consume(kafka: KafkaConfig) -> None:
    async with started(AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap)):
        pass


async def _carelessly(kafka: KafkaConfig) -> None:
    made = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)
    await made.start()
    await made.stop()


USES = [_produce, _consume, _administer, _publish, _read, _watch, _write, _notify, _ask_who_refuses]


@pytest.mark.slow
async def test_one_that_is_cancelled_at_any_moment_leaves_nothing_open(embedded: Broker) -> None:
    for use in USES:
        turns, found = await _left_open(functools.partial(use, embedded.config))
        assert turns > 5, f"{use.__name__} was never under way"
        assert found == [], use.__name__
    _, found = await _left_open(functools.partial(_carelessly, embedded.config))
    assert found, "aiokafka closes by itself what is cancelled: `started` need not"


async def _write_with_transactions(kafka: KafkaConfig) -> None:
    """This broker knows coordinators and refuses what they are asked for, which is all that fencing needs."""
    with suppress(KafkaError):
        await _write(msgspec.structs.replace(kafka, transactions=True))


async def _write_carelessly(kafka: KafkaConfig) -> None:
    producer = AIOKafkaProducer(**client_options(kafka), transactional_id="klaxon-gate-0")
    try:
        with suppress(KafkaError):
            await whole(producer.start())
    finally:
        await whole(producer.stop())


async def _look_at_transactions(kafka: KafkaConfig) -> None:
    assert [one.code async for one in _transactions(kafka)] == ["transactions_unavailable"]


@pytest.mark.slow
async def test_a_gate_s_writer_that_is_cancelled_fences_nobody_from_then_on(
    embedded: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may have begun: what is done whole is its connections alone."""
    send, cancelled, asked, late = AIOKafkaClient.send, False, 0, 0

    def cancelling() -> None:
        nonlocal cancelled
        cancelled = True

    async def noted(client: AIOKafkaClient, node: int, request: object, **named: object) -> object:
        nonlocal asked, late
        if isinstance(request, InitProducerIdRequest):
            asked, late = asked + 1, late + cancelled
        return await send(client, node, request, **named)

    monkeypatch.setattr(AIOKafkaClient, "send", noted)

    async def fenced_late(use: Callable[[KafkaConfig], Awaitable[None]]) -> int:
        nonlocal asked, late

        async def anew() -> None:
            nonlocal cancelled
            cancelled = False
            await use(embedded.config)

        asked = late = 0
        _, found = await _left_open(anew, cancelling)
        assert found == [], use.__name__
        assert asked > 0, f"{use.__name__} never came to it"
        return late

    assert await fenced_late(_write_with_transactions) == 0
    assert await fenced_late(_write_carelessly) > 0, (
        "what is done whole fences nobody late: so may `start` be"
    )
    await fenced_late(_look_at_transactions)
