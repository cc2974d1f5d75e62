"""The batching producer: events in, numbered columnar batches out, never in its caller's way."""

from agents.publish.kafka import KafkaRecordProducer
from agents.publish.producer import DeliveryError, RecordProducer
from agents.publish.publisher import Publisher
from agents.publish.settings import DropReason, PublisherSettings, PublisherStats

__all__ = (
    "DeliveryError",
    "DropReason",
    "KafkaRecordProducer",
    "Publisher",
    "PublisherSettings",
    "PublisherStats",
    "RecordProducer",
)
