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
from schemas.whole import whole

_PERMANENT: Final = (
    InvalidTopicError,
    MessageSizeTooLargeError,
    ProducerFenced,
    TopicAuthorizationFailedError,
)


class KafkaRecordProducer:
    """RecordProducer on aiokafka. `idempotent`: off for brokers that refuse producer ids (the embedded one).

    `options` are handed to aiokafka as they are (`security_protocol`, `ssl_context`, `sasl_*`, …).

    `compression`: aiokafka runs lz4 at its level 9, which takes 8 times the CPU of its zstd (level 3) for
    answers a third larger; gzip takes 20 times it. Snappy takes half of it and sends 1.7 times as much.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str = "klaxon-publish",
        idempotent: bool = True,
        compression: str | None = "zstd",
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
            await whole(producer.start())
        except (KafkaError, OSError) as error:
            await whole(producer.stop())
            raise DeliveryError(f"broker {self._bootstrap} cannot be reached: {error!r}") from error
        except BaseException:  # cancelled, too: a publisher may be closed while its producer connects
            await whole(producer.stop())
            raise
        self._producer = producer

    async def stop(self) -> None:
        """Disconnect. Harmless when not started."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await whole(producer.stop())

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
