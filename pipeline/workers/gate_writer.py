"""The one writer of a gating partition: whole effects in a transaction, every predecessor is fenced.

Outside Faust, on aiokafka's transactional producer. On the embedded broker, which knows no transactions, the
same records are written one after another by a plain producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Final

import msgspec
from aiokafka import AIOKafkaProducer
from aiokafka.errors import IllegalOperation, InvalidProducerEpoch, KafkaError, ProducerFenced

from pipeline.config import KafkaConfig
from pipeline.core.gate.settings import Effect
from pipeline.core.gate.state import encode_state
from pipeline.errors import PipelineError
from pipeline.workers.broker import client_options
from pipeline.workers.faults import fault
from pipeline.workers.gate_signatures import UNSIGNED, GateSignatures
from schemas.control import Directive
from schemas.topics import CONTENT_TYPE, JSON, Topic
from schemas.whole import whole

PRIVATE_NAMES: Final = {"aiokafka.AIOKafkaProducer": ("_sender",)}
TRANSACTION_TIMEOUT_MS: Final = 10_000
"""Readers wait for an open transaction: a dead writer's ends after this, or when its successor comes."""
ABORT_TIMEOUT_S: Final = 5.0
HEADERS: Final = [(CONTENT_TYPE, JSON.encode())]


class FencedError(PipelineError):
    """Another process writes this gating partition now, or the broker gave up a transaction of this one.

    The broker's answer to both is the same.
    """


class GateWriter:
    """Not re-entrant: one `write` at a time. `start` before use, `close` after."""

    def __init__(self, kafka: KafkaConfig, partition: int, signatures: GateSignatures = UNSIGNED) -> None:
        self._partition = partition
        self._signatures = signatures
        self._kafka = kafka
        self._producer: AIOKafkaProducer | None = None
        """From `start` on: what never started has nothing to close."""
        self._closed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect; with transactions, every predecessor is fenced and its open transaction aborted by now.

        Who is cancelled meanwhile fences nobody from then on: whoever has the seat next may have begun.
        """
        transaction = (
            {
                "transactional_id": f"klaxon-gate-{self._partition}",
                "transaction_timeout_ms": TRANSACTION_TIMEOUT_MS,
            }
            if self._kafka.transactions
            else {}
        )
        producer = AIOKafkaProducer(**client_options(self._kafka), acks="all", **transaction)
        self._producer = producer
        await whole(producer.client.bootstrap())
        await producer._sender.start()  # noqa: SLF001 (this fences: not to be done whole)

    async def write(self, effects: Sequence[Effect]) -> None:
        """Write everything of these effects, or nothing; returns when it is committed.

        Raises FencedError when a successor has started or `close` came in between, else aiokafka's errors.
        """
        # aiokafka leaves whoever waits for a transaction of a producer that was stopped waiting for ever.
        self._writing = writing = asyncio.create_task(self._write(list(_records(effects))))
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait([writing, closed], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._end_writing()
            raise
        finally:
            closed.cancel()
        if not writing.done() or writing.cancelled():
            raise FencedError(f"gating partition {self._partition}: no longer written by this process")
        writing.result()

    async def _write(self, records: list[tuple[Topic, str, bytes | None]]) -> None:
        assert self._producer is not None, "not started"
        try:
            if not self._kafka.transactions:
                for record in records:
                    await self._send(self._producer, *record)
                return
            fault("gate_before_transaction")
            async with self._producer.transaction():
                await _all_sent([self._send(self._producer, *record) for record in records])
                fault("gate_in_transaction")
            fault("gate_after_transaction")
        except (ProducerFenced, InvalidProducerEpoch):
            raise FencedError(
                f"gating partition {self._partition}: another gate process has taken over, or its "
                f"transaction took longer than {TRANSACTION_TIMEOUT_MS / 1000:g} s; ending this one"
            ) from None

    async def close(self) -> None:
        """Abort what is open and disconnect; a `write` that waits ends. What was on its way may meet a
        successor: from a writer that is closed that is no fencing."""
        self._closed.set()
        await self._end_writing()
        if self._producer is not None:
            await whole(_disconnect(self._producer))

    async def _end_writing(self) -> None:
        """Abort the transaction under way; a broker that does not answer aborts it by itself later."""
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            await asyncio.wait([self._writing], timeout=ABORT_TIMEOUT_S)
            if self._writing.done() and not self._writing.cancelled():
                self._writing.exception()  # seen: there is nothing to be done about it any more

    async def _send(self, producer: AIOKafkaProducer, topic: Topic, key: str, value: bytes | None) -> None:
        named = key.encode()
        headers = [*HEADERS, *self._signatures.headers(topic, named, value or b"")]
        await producer.send_and_wait(
            topic.value, value, key=named, partition=self._partition, headers=headers
        )


async def _disconnect(producer: AIOKafkaProducer) -> None:
    try:
        await producer.stop()
    except KafkaError:
        await producer.client.close()  # aiokafka leaves it open then


async def _all_sent(sends: Sequence[Coroutine[None, None, None]]) -> None:
    """Wait for every one, and raise what ended the transaction.

    Not what comes of that: whatever is about to be sent then meets a producer outside any transaction, and
    can say so before the record that the broker refused does.
    """
    met = await asyncio.gather(*sends, return_exceptions=True)
    failed = [each for each in met if isinstance(each, BaseException)]
    if failed:
        raise next((each for each in failed if not isinstance(each, IllegalOperation)), failed[0])


def _records(effects: Sequence[Effect]) -> Iterator[tuple[Topic, str, bytes | None]]:
    """Topic, key and value (None: a tombstone); what a router acts on comes last. Of a state that several
    hold the newest."""
    for effect in effects:
        if effect.rollout is not None:
            yield Topic.ROLLOUTS, effect.name, msgspec.json.encode(effect.rollout)
    for state in {state.key: state for effect in effects for state in effect.states}.values():
        yield Topic.STATE, state.key, encode_state(state)
    for effect in effects:
        if effect.decision is not None:
            yield Topic.DECISIONS, effect.name, msgspec.json.encode(effect.decision)
    for effect in effects:
        if effect.directive is not None:
            yield Topic.CONTROL, effect.name, control_value(effect.directive)


def control_value(directive: Directive) -> bytes:
    """A directive as it stands on the control topic."""
    return msgspec.json.encode(directive)
