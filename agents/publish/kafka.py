"""The record producer on aiokafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerFenced,
    TopicAuthorizationFailedError,
)

from agents.publish.producer import DeliveryError

_PERMANENT: Final = (
    InvalidTopicError,
    MessageSizeTooLargeError,
    ProducerFenced,
    TopicAuthorizationFailedError,
)


class KafkaRecordProducer:
    """RecordProducer on aiokafka. `idempotent`: off for brokers that refuse producer ids (the embedded one).

    `options` are handed to aiokafka as they are (`security_protocol`, `ssl_context`, `sasl_*`, …).
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str = "klaxon-publish",
        idempotent: bool = True,
        compression: str | None = "lz4",
        request_timeout_ms: int = 10_000,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "client_id": client_id,
            "enable_idempotence": idempotent,
            "acks": "all",
            "compression_type": compression,
            "request_timeout_ms": request_timeout_ms,
            "max_request_size": 1_000_000,
            **(options or {}),
        }
        self._bootstrap = bootstrap
        self._producer: Any = None

    async def start(self) -> None:
        """Connect. May be called again after it failed."""
        producer = AIOKafkaProducer(**self._options)
        try:
            await producer.start()
        except (KafkaError, OSError) as error:
            await producer.stop()
            raise DeliveryError(f"broker {self._bootstrap} cannot be reached: {error!r}") from error
        self._producer = producer

    async def stop(self) -> None:
        """Disconnect. Harmless when not started."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.stop()

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        try:
            found = await self._started().partitions_for(topic)
        except (KafkaError, OSError) as error:
            raise DeliveryError(f"topic {topic} on {self._bootstrap}: {error!r}") from error
        return len(found)

    async def send(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes,
        headers: Sequence[tuple[str, bytes]],
    ) -> None:
        """Send one record and return once the broker has acknowledged it."""
        try:
            await self._started().send_and_wait(
                topic, value=value, key=key, partition=partition, headers=list(headers)
            )
        except _PERMANENT as error:
            raise DeliveryError(f"topic {topic}: {error!r}", permanent=True) from error
        except (KafkaError, OSError) as error:
            raise DeliveryError(f"topic {topic} on {self._bootstrap}: {error!r}") from error

    def _started(self) -> Any:
        if self._producer is None:
            raise DeliveryError(f"not connected to {self._bootstrap}")
        return self._producer
