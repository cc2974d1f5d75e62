"""The private names of Faust and aiokafka that the transport stands on, against the exact pins."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from importlib.metadata import version
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.structs import ConsumerRecord
from faust.app.base import App
from faust.transport.consumer import ThreadDelegateConsumer
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from hypothesis import given
from hypothesis import strategies as st
from mode import Service
from mode.threads import ServiceThread

from pipeline.config import KafkaConfig
from pipeline.workers import answers, gate_writer, transport
from pipeline.workers.records import Record
from schemas.topics import Topic

PLACE = TP(Topic.REQUESTS, 0)


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
    [
        (path, name)
        for module in (answers, gate_writer, transport)
        for path, names in module.PRIVATE_NAMES.items()
        for name in names
    ],
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


def _record(
    offset: int,
    value: bytes | None = b"value",
    key: bytes | None = None,
    headers: tuple[tuple[str, bytes | None], ...] = (),
) -> ConsumerRecord[bytes, bytes]:
    return ConsumerRecord(PLACE.topic, PLACE.partition, offset, 7, 1, key, value, None, 0, 5, headers)


def _holding(offset: int, size: int, part: str) -> ConsumerRecord[bytes, bytes]:
    """A record of so many bytes, all in one part of it."""
    content = CONTENTS[size]
    if part == "header's name":
        return _record(offset, None, headers=((content.decode(), None),))
    if part == "header":
        return _record(offset, None, headers=(("", content),))
    if part == "key":
        return _record(offset, None, content)
    return _record(offset, content or None)


SIZES = [0, 1, transport.RUN_BYTES // 2, transport.RUN_BYTES + 1]
CONTENTS = {size: bytes(size) for size in SIZES}


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(SIZES), st.sampled_from(["value", "key", "header", "header's name"])),
            min_size=1,
        ),
        max_size=3,
    )
)
def test_what_a_poll_brought_is_cut_into_runs_of_one_partition_in_order(
    polled: list[list[tuple[int, str]]],
) -> None:
    poll = {
        TP(Topic.REQUESTS, partition): [
            _holding(offset, size, part) for offset, (size, part) in enumerate(records)
        ]
        for partition, records in enumerate(polled)
    }
    found: dict[TP, list[Any]] = {place: [] for place in poll}
    held: dict[TP, int] = {}
    for place, run in transport._Runs().iterate(poll):
        first = len(found[place])
        sizes = [size for size, _ in polled[place.partition][first : first + len(run)]]
        assert len(run) == 1 or sum(sizes) <= transport.RUN_BYTES
        # Not one more than it takes.
        assert place not in held or held[place] + sizes[0] > transport.RUN_BYTES
        held[place] = sum(sizes)
        found[place] += run
    assert found == poll


def _run(app: transport.KlaxonApp, records: list[Any]) -> Any:
    app.finalize()
    made: Any = app.transport.create_consumer(
        callback=lambda _: None, on_partitions_revoked=None, on_partitions_assigned=None
    )
    made._thread.thread_loop.close()
    ((place, run),) = made.scheduler.iterate({PLACE: records})
    return made._to_message(place, run)


@pytest.mark.parametrize("breaks_off", ["never", "another generation", "a rebalance begins"])
async def test_a_run_is_one_message_and_read_until_the_group_rebalances(breaks_off: str) -> None:
    app = transport.KlaxonApp("group", KafkaConfig())
    app.consumer_generation_id = 3
    run = _run(app, [_record(offset) for offset in (4, 5, 8)])
    assert (run.tp, run.offset, run.generation_id) == (PLACE, 8, 3)
    app.flow_control.resume()
    read: list[tuple[int, int]] = []

    async def take(record: Record) -> None:
        read.append((record.offset, record.append_us))
        if len(read) == 2 and breaks_off == "another generation":
            app.consumer_generation_id = 4
        elif len(read) == 2 and breaks_off == "a rebalance begins":
            app.flow_control.suspend()

    await app._read(run, take)
    assert read == [(4, 7_000), (5, 7_000), (8, 7_000)][: 3 if breaks_off == "never" else 2]


async def test_faust_keeps_no_account_of_offsets() -> None:
    """With acks it keeps every gap (of markers, and between runs' last records) and looks at all at each."""

    async def nothing(_: Any) -> None:
        """Not called."""

    app = transport.KlaxonApp("group", KafkaConfig())
    app.connect([Topic.REQUESTS], read=nothing, assigned=nothing, revoked=nothing)
    app.finalize()
    (agent,) = app.agents.values()
    app.topics.add(agent.channel)
    await app.topics._update_indices()
    assert not app.topics.acks_enabled_for(Topic.REQUESTS.value)


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


def test_a_producer_connects_and_then_does_what_fences() -> None:
    """The gate's writer takes these two steps one by one."""
    source = inspect.getsource(AIOKafkaProducer.start)
    assert "await self.client.bootstrap()\n        await self._sender.start()\n" in source
    assert source.count("await ") == 2


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


async def test_the_loop_turns_while_the_consumer_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebalance that it is in the midst of ends only with the loop's help."""
    turned = threading.Event()

    class Thread:
        def stop(self) -> None:
            assert turned.wait(5)

    async def told(_: Any) -> None:
        """It ends by itself."""

    thread = _consumer_thread()
    monkeypatch.setattr(Service, "stop", told)
    try:
        thread._started.set()
        thread._thread = Thread()
        asyncio.get_running_loop().call_later(0.01, turned.set)
        await thread.stop()
    finally:
        thread._consumer._closed = True  # never started: nothing to stop
        thread.thread_loop.close()
    # When this fails, mode has mended it: drop ours.
    assert "await self._thread.stop" not in inspect.getsource(ServiceThread.stop)
    assert "self._thread.stop()" in inspect.getsource(ServiceThread.stop)


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
