"""What a group has committed, when its coordinator does not say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CoordinatorLoadInProgressError
from aiokafka.structs import OffsetAndMetadata

from pipeline.config import KafkaConfig
from pipeline.workers import broker
from pipeline.workers.records import Partition

PLACE = Partition("klaxon.logits", 1)


class Admin:
    def __init__(self, answers: list[dict[TopicPartition, OffsetAndMetadata]]) -> None:
        self._answers = answers

    async def list_consumer_group_offsets(self, group: str, partitions: Any) -> Any:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def asked(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[TopicPartition, OffsetAndMetadata]]
) -> int | None:
    @asynccontextmanager
    async def admin_client(_: KafkaConfig) -> AsyncIterator[Admin]:
        yield Admin(answers)

    monkeypatch.setattr(broker, "admin_client", admin_client)
    monkeypatch.setattr(broker, "back_off_s", lambda _: 0.0)
    return await broker.committed_offset(KafkaConfig(), "klaxon-pair", PLACE)


def said(offset: int) -> dict[TopicPartition, OffsetAndMetadata]:
    return {TopicPartition(*PLACE): OffsetAndMetadata(offset, "")}


async def test_an_answer_without_the_partition_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiokafka gives {} for an answer that is an error as a whole: that is not "nothing committed"."""
    assert await asked(monkeypatch, [{}, {}, said(7)]) == 7


async def test_nothing_committed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await asked(monkeypatch, [said(-1)]) is None


async def test_a_coordinator_that_never_says_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CoordinatorLoadInProgressError):
        await asked(monkeypatch, [{}])
