"""The private names of Faust and aiokafka that the transport stands on, against the exact pins."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import Fetcher
from faust.app.base import App
from faust.transport.consumer import ThreadDelegateConsumer
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from pipeline.config import KafkaConfig
from pipeline.workers import transport


@pytest.mark.parametrize(
    ("package", "pinned"),
    [("faust-streaming", "0.15.3"), ("mode-streaming", "0.7.1"), ("aiokafka", "0.14.0")],
)
def test_the_pins_are_installed(package: str, pinned: str) -> None:
    assert version(package) == pinned


def _resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in transport.PRIVATE_NAMES.items() for name in names],
)
def test_every_private_name_is_still_there(path: str, name: str) -> None:
    owner = _resolve(path)
    source = inspect.getsource(owner)
    assert hasattr(owner, name) or f"self.{name} =" in source or f"self.{name}:" in source


@pytest.mark.parametrize(
    ("patient", "wait_ms", "least_bytes"),
    [(False, 37, 1), (True, transport.PATIENT_WAIT_MS, transport.PATIENT_BYTES)],
)
async def test_the_consumer_thread_is_made_by_our_transport_and_reads_committed(
    patient: bool, wait_ms: int, least_bytes: int
) -> None:
    app = transport.KlaxonApp("group", KafkaConfig(fetch_wait_ms=37), patient=patient)
    app.finalize()
    made = app.transport.create_consumer(
        callback=lambda _: None, on_partitions_revoked=None, on_partitions_assigned=None
    )
    thread = made._thread
    consumer = thread._create_worker_consumer(app.transport)
    try:
        assert consumer._isolation_level == "read_committed"
        assert consumer._fetch_max_wait_ms == wait_ms
        assert consumer._fetch_min_bytes == least_bytes
        assert consumer._client._metadata_max_age_ms == transport.METADATA_AGE_MS
    finally:
        consumer._closed = True  # never started: nothing to stop
        thread.thread_loop.close()


def test_faust_still_hard_wires_the_opposite() -> None:
    """When this fails, Faust has an isolation setting of its own: use it, and drop the subclass."""
    source = inspect.getsource(driver.AIOKafkaConsumerThread._create_worker_consumer)
    assert 'isolation_level: str = "read_uncommitted"' in source
    assert "fetch_max_wait_ms=1500" in source


def test_aiokafka_still_looks_for_no_new_leader_when_the_old_one_knows_no_first_offset() -> None:
    """Why metadata must be young: elsewhere it asks for new metadata, here it does not."""
    assert "force_metadata_update" in inspect.getsource(Fetcher._retrieve_offsets)
    assert "force_metadata_update" not in inspect.getsource(Fetcher._update_fetch_positions)


def test_isolation_and_fetch_wait_are_read_when_the_consumer_starts() -> None:
    """We set both after construction; they count because only `start` hands them to the fetcher."""
    source = inspect.getsource(AIOKafkaConsumer.start)
    assert "isolation_level=self._isolation_level" in source
    assert "fetch_max_wait_ms=self._fetch_max_wait_ms" in source


def test_a_commit_goes_to_the_group_without_a_flush() -> None:
    assert "flush" not in inspect.getsource(ThreadDelegateConsumer._commit)
    source = inspect.getsource(driver.AIOKafkaConsumerThread._commit)
    assert "consumer.commit(" in source
    assert "flush" not in source


def test_faust_makes_folders_only_where_we_override_it() -> None:
    assert "_create_directories" in inspect.getsource(App.on_first_start)


async def test_a_commit_of_partitions_that_were_just_revoked_is_none_and_no_crash() -> None:
    thread = _consumer_thread()
    try:
        assert await thread._commit({TP("klaxon.requests", 0): 5}) is False
        assert thread.crash_reason is None
        # When this fails, Faust has mended it: drop ours.
        assert await driver.AIOKafkaConsumerThread._commit(thread, {TP("klaxon.requests", 0): 5}) is False
        assert thread.crash_reason is not None
    finally:
        thread._consumer._closed = True  # never started: nothing to stop
        thread.thread_loop.close()


def _consumer_thread() -> Any:
    """Ours, to which nothing is assigned."""
    app = transport.KlaxonApp("group", KafkaConfig())
    app.finalize()
    made = app.transport.create_consumer(
        callback=lambda _: None, on_partitions_revoked=None, on_partitions_assigned=None
    )
    thread = made._thread
    thread._consumer = thread._create_worker_consumer(app.transport)
    return thread
