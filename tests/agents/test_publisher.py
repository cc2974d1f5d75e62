"""The publisher against a producer that the test steers: batches, places, bounds, drops, order, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from agents.publish import DeliveryError, Publisher, PublisherSettings
from agents.publish.batches import CODECS, cut_to_record, encode_sound, wire_bytes
from agents.publish.settings import BatchLimit
from schemas import codec
from schemas.columns import BatchHeader
from schemas.events import FeedbackEvent, LogitEvent, NodeEvent, RequestEvent
from schemas.topics import COLUMNS, JSON, MAX_RECORD_BYTES, Topic, partition_of
from tests.agents.fakes import FakeProducer, Sent
from tests.patience import patient

LONG = 3_600_000_000


def request(i: int = 0, **changes: Any) -> RequestEvent:
    fields: dict[str, Any] = {
        "v": 1,
        "rollout": "r",
        "arm": "canary",
        "signature": f"{i:032x}",
        "pair_id": f"{i:032x}",
        "ts_us": 1_767_225_600_000_000 + i,
        "duration_us": 1000,
        "node": "n",
        "input_tokens": i,
        "model_version": "m",
        "shadow": False,
        "status": 200,
        "output_tokens": 3,
    }
    return RequestEvent(**{**fields, **changes})


def logits(i: int = 0, positions: int = 3, k: int = 5, **changes: Any) -> LogitEvent:
    labels = {
        name: getattr(request(i), name)
        for name in (
            "v", "rollout", "arm", "signature", "pair_id", "ts_us", "duration_us", "node", "input_tokens",
            "model_version",
        )
    }  # fmt: skip
    fields: dict[str, Any] = {
        **labels,
        "expected_arms": ("baseline", "canary"),
        "definition": "raw",
        "source": "generated",
        "tokens": (1,) * positions,
        "top_ids": (tuple(range(k)),) * positions,
        "top_logprobs": (tuple(-2.0 - j for j in range(k)),) * positions,
    }
    return LogitEvent(**{**fields, **changes})


def settings(**changes: Any) -> PublisherSettings:
    return PublisherSettings(
        **{"producer_id": "p-1", "retry_first_us": 1000, "retry_most_us": 2000, **changes}
    )


def requests_in(sent: Sent) -> Any:
    return codec.decode_requests(sent.value, sent.headers["content-type"].decode())


async def started(producer: FakeProducer, **changes: Any) -> Publisher:
    """With a patient clock: what is due, given up or over is so by the test's own waiting."""
    patient()
    publisher = Publisher(producer, settings(**changes))
    publisher.start()
    return publisher


async def test_every_event_arrives_once_where_its_key_belongs() -> None:
    producer = FakeProducer()
    publisher = await started(producer)
    for i in range(1000):
        assert publisher.publish(request(i))
    stats = await publisher.close(10)
    seen = []
    for sent in producer.sent:
        decoded = requests_in(sent)
        assert decoded.rejected == ()
        for row in decoded.columns.signature:
            signature = row.tobytes().hex()
            assert sent.partition == partition_of(signature.encode(), 4)
            seen.append(int(signature, 16))
    assert sorted(seen) == list(range(1000))
    assert (stats.accepted, stats.acknowledged, stats.queued_events, stats.queued_bytes) == (1000, 1000, 0, 0)
    assert producer.stopped


async def test_batches_are_numbered_from_zero_per_partition() -> None:
    producer = FakeProducer()
    publisher = await started(producer, batch_limits={Topic.REQUESTS: BatchLimit(3, 10_000)})
    for i in range(100):
        publisher.publish(request(i))
    await publisher.close(10)
    by_partition: dict[Any, list[int]] = {}
    for sent in producer.sent:
        header = requests_in(sent).header
        assert header.producer_id == "p-1"
        assert header.dropped == {}
        by_partition.setdefault(sent.partition, []).append(header.sequence)
    assert len(by_partition) == 4
    for numbers in by_partition.values():
        assert numbers == list(range(len(numbers)))


async def test_a_full_batch_does_not_wait_for_its_age() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer, flush_age_us=LONG)
    for i in range(500):
        publisher.publish(request(i))
    await producer.until_sent(1)
    publisher.publish(request(500))
    assert requests_in(producer.sent[0]).columns.n == 500
    assert len(producer.sent) == 1
    assert (await publisher.close(10)).acknowledged == 501


async def test_a_batch_full_of_bytes_does_not_wait_for_its_age() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer, flush_age_us=LONG)
    for i in range(20):
        publisher.publish(logits(i, positions=600))
    await producer.until_sent(1)
    assert len(producer.sent[0].value) <= 330_000
    assert codec.decode_logits(producer.sent[0].value, COLUMNS).columns.n < 20
    await publisher.close(10)
    assert sum(codec.decode_logits(s.value, COLUMNS).columns.n for s in producer.sent) == 20


async def test_a_batch_that_stays_small_is_sent_by_age() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer, flush_age_us=1000)
    publisher.publish(request(1))
    await producer.until_sent(1)
    publisher.publish(request(2))
    await producer.until_sent(2)
    await publisher.close(10)


async def test_what_waits_in_several_partitions_is_sent_at_one_moment() -> None:
    producer = FakeProducer()
    publisher = await started(producer, flush_age_us=1_000_000)
    for i in range(1, 9):
        publisher.publish(request(i))
        await asyncio.sleep(0.02)
    assert producer.sent == []
    await producer.until_sent(1)
    for _ in range(20):  # turns of the loop, no time
        await asyncio.sleep(0)
    assert {sent.partition for sent in producer.sent} == {0, 1, 2, 3}
    await publisher.close(10)


async def test_telemetry_and_feedback_have_batches_too() -> None:
    producer = FakeProducer()
    publisher = await started(producer)
    publisher.publish(NodeEvent(v=1, node="gpu-1", ts_us=1))
    publisher.publish(
        FeedbackEvent(v=1, signature="0" * 32, ts_us=1, source="click", label="good", confidence=1.0)
    )
    await publisher.close(10)
    by_topic = {sent.topic: sent for sent in producer.sent}
    node = by_topic["klaxon.telemetry"]
    assert node.partition == partition_of(b"gpu-1", 4)
    assert codec.decode_telemetry(node.value, COLUMNS).columns.node.get(0) == "gpu-1"
    feedback = by_topic["klaxon.feedback"]
    assert feedback.headers == {"content-type": JSON.encode()}
    assert msgspec.json.decode(feedback.value)[0]["label"] == "good"


async def test_overload_drops_counts_and_reports_it_once() -> None:
    producer = FakeProducer(partition_count=1)
    producer.open.clear()
    publisher = await started(producer, queue_events=10, flush_age_us=1000)
    accepted = [publisher.publish(request(i, arm="baseline" if i % 2 else "canary")) for i in range(30)]
    assert accepted == [True] * 10 + [False] * 20
    assert publisher.stats().dropped == {"queue_full": 20}
    producer.open.set()
    assert await publisher.drain(10)
    publisher.publish(request(99))
    await publisher.close(10)
    reported = [requests_in(sent).header.dropped for sent in producer.sent]
    total = {key: sum(r.get(key, 0) for r in reported) for key in ("r/canary", "r/baseline")}
    assert total == {"r/canary": 10, "r/baseline": 10}
    assert sum(requests_in(sent).columns.n for sent in producer.sent) == 11


async def test_bytes_are_bounded_too() -> None:
    producer = FakeProducer()
    producer.open.clear()
    event = logits(positions=1000)
    publisher = await started(producer, queue_bytes=3 * wire_bytes(event))
    assert [publisher.publish(event) for _ in range(5)] == [True, True, True, False, False]
    assert publisher.stats().queued_bytes <= 3 * wire_bytes(event)
    producer.open.set()
    await publisher.close(10)


async def test_drops_are_reported_without_further_events() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer, flush_age_us=1000, queue_events=1)
    publisher.publish(request(0))
    await producer.until_sent(1)
    assert await publisher.drain(10)
    producer.open.clear()
    publisher.publish(request(1))
    await producer.until_waiting(1)
    assert not publisher.publish(request(2))
    producer.open.set()
    await producer.until_sent(3)
    last = requests_in(producer.sent[-1])
    assert (last.columns.n, last.header.dropped, last.header.sequence) == (0, {"r/canary": 1}, 2)
    await publisher.close(10)


async def test_what_never_came_to_be_is_reported_as_a_drop() -> None:
    producer = FakeProducer(partition_count=2)
    publisher = await started(producer, flush_age_us=1000)
    publisher.report_drop(Topic.LOGITS, "r", "canary")
    publisher.report_drop(Topic.LOGITS, "r", "control")
    publisher.report_drop(Topic.LOGITS, "r", "canary")
    await producer.until_sent(1)
    (sent,) = producer.sent
    decoded = codec.decode_logits(sent.value, sent.headers["content-type"].decode())
    assert (sent.topic, sent.partition) == (Topic.LOGITS.value, 0)
    assert (decoded.columns.n, decoded.header.dropped) == (0, {"r/canary": 2, "r/control": 1})
    stats = await publisher.close(10)
    assert (stats.reported, stats.dropped, len(producer.sent)) == (3, {}, 1)
    publisher.report_drop(Topic.LOGITS, "r", "canary")  # nobody is left who could say it
    assert publisher.stats().reported == 3


async def test_events_of_a_topic_that_come_while_another_is_asked_for_are_sent() -> None:
    """Their topic was not known to be wanted, and what hands events over ended."""
    producer = SlowToTell(partition_count=1)
    publisher = await started(producer, flush_age_us=1000)
    publisher.publish(request(0))
    async with asyncio.timeout(60):
        await producer.asked.wait()
    publisher.publish(logits(0))
    producer.tell.set()
    await producer.until_sent(2)
    assert {sent.topic for sent in producer.sent} == {Topic.REQUESTS.value, Topic.LOGITS.value}
    await publisher.close(10)


class SlowToTell(FakeProducer):
    """Says how many partitions a topic has when told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked, self.tell = asyncio.Event(), asyncio.Event()

    async def partitions(self, topic: str) -> int:
        self.asked.set()
        await self.tell.wait()
        return self.partition_count


async def test_a_failed_batch_is_sent_again_with_its_number() -> None:
    producer = FakeProducer(partition_count=1, failures=[DeliveryError("down"), DeliveryError("down")])
    publisher = await started(producer)
    publisher.publish(request(1))
    stats = await publisher.close(10)
    (sent,) = producer.sent
    assert requests_in(sent).header.sequence == 0
    assert (stats.retries, stats.acknowledged, stats.dropped) == (2, 1, {})


async def test_a_batch_given_up_is_reported_and_leaves_a_gap() -> None:
    producer = FakeProducer(partition_count=1, failures=[DeliveryError("forbidden", permanent=True)])
    publisher = await started(producer, flush_age_us=1000)
    for i in range(3):
        publisher.publish(request(i))
    assert await publisher.drain(10)
    publisher.publish(request(9))
    stats = await publisher.close(10)
    headers = [requests_in(sent).header for sent in producer.sent]
    assert [h.sequence for h in headers] == list(range(1, 1 + len(headers)))
    assert sum(h.dropped.get("r/canary", 0) for h in headers) == 3
    assert stats.dropped == {"undeliverable": 3}


async def test_a_broker_that_stays_away_costs_the_events_in_the_end() -> None:
    producer = FakeProducer(failures=[DeliveryError("down")] * 10_000, partition_count=1)
    publisher = await started(producer, give_up_us=20_000)
    publisher.publish(request(1))
    assert await publisher.drain(10)
    assert publisher.stats().dropped == {"undeliverable": 1}
    await publisher.close(1)


async def test_it_connects_when_the_broker_comes_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    producer = FakeProducer(start_failures=3)
    publisher = await started(producer)
    publisher.publish(request(1))
    stats = await publisher.close(10)
    assert producer.starts == 4
    assert stats.acknowledged == 1
    (away, back) = (record.message for record in caplog.records)
    assert away.startswith("not publishing yet")
    assert back == "publishing now"


async def test_a_broker_that_never_comes_drops_what_is_too_old() -> None:
    producer = FakeProducer(start_failures=10**9)
    publisher = await started(producer, give_up_us=10_000)
    publisher.publish(request(1))
    assert await publisher.drain(10)
    assert publisher.stats().dropped == {"undeliverable": 1}
    await publisher.close(1)


async def test_an_event_its_readers_would_refuse_costs_only_itself() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer)
    misfits = [
        request(1, ts_us=-5),
        request(2, status=5000),
        request(3, status=70_000),
        request(4, input_tokens=None),
        request(5, region="x" * 300),
        request(6, node=7),
        request(7, arm="shadow"),
        request(8, temperature=float("nan")),
        request(9, signature="f" * 31),
        request(10, signature=None),
        request(11, scores={"a": "b"}),
    ]
    for i, misfit in enumerate(misfits):
        publisher.publish(request(100 + i))
        publisher.publish(misfit)
    publisher.publish("not an event")  # type: ignore[arg-type]
    stats = await publisher.close(10)
    received = [n for sent in producer.sent for n in requests_in(sent).columns.input_tokens.tolist()]
    assert received == [100 + i for i in range(len(misfits))]
    assert all(requests_in(sent).rejected == () for sent in producer.sent)
    assert stats.dropped == {"invalid": len(misfits) + 1}
    assert stats.acknowledged == len(misfits)


async def test_logit_events_that_form_no_positions_cost_only_themselves() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer)
    publisher.publish(logits(0))
    publisher.publish(logits(1, tokens=(1, 2)))
    publisher.publish(logits(2, top_ids=None))
    publisher.publish(logits(3, top_logprobs=((0.9,) * 5,) * 3))
    publisher.publish(logits(4))
    stats = await publisher.close(10)
    decoded, report = (codec.decode_logits(sent.value, COLUMNS) for sent in producer.sent)
    assert decoded.columns.input_tokens.tolist() == [0, 4]
    assert report.header is not None
    assert report.header.dropped == {"r/canary": 3}
    assert stats.dropped == {"invalid": 3}


@pytest.mark.parametrize("k", [5, 20])
async def test_a_huge_answer_is_cut_at_a_whole_position(k: int) -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer)
    event = logits(1, positions=60_000, k=k, ended=True)
    assert publisher.publish(event)
    stats = await publisher.close(10)
    (sent,) = producer.sent
    assert 0.8 * MAX_RECORD_BYTES < len(sent.value) <= MAX_RECORD_BYTES
    decoded = codec.decode_logits(sent.value, COLUMNS)
    assert decoded.rejected == ()
    assert decoded.columns.ended.tolist() == [-1]
    assert stats.cut == 1


def test_an_answer_that_fits_is_not_cut() -> None:
    event = logits(1, positions=2000)
    assert cut_to_record(event) is event


async def test_an_event_over_a_record_is_dropped() -> None:
    producer = FakeProducer()
    publisher = await started(producer)
    assert not publisher.publish(request(1, embedding=(0.1,) * 60_000))
    assert publisher.stats().dropped == {"too_large": 1}
    await publisher.close(1)


async def test_closing_refuses_new_events_and_drops_what_cannot_leave() -> None:
    producer = FakeProducer(partition_count=1)
    publisher = await started(producer)
    producer.open.clear()
    publisher.publish(request(1))
    stats = await publisher.close(0.05)
    assert stats.dropped == {"closed": 1}
    assert not publisher.publish(request(2))
    assert publisher.stats().dropped == {"closed": 2}


async def test_a_stalled_partition_does_not_hold_the_others() -> None:
    class OneStalls(FakeProducer):
        async def send(self, topic: str, partition: int | None, *rest: Any) -> None:
            if partition == 0:
                await asyncio.Event().wait()
            await super().send(topic, partition, *rest)

    producer = OneStalls()
    publisher = await started(producer, flush_age_us=1000)
    events = [request(i) for i in range(200)]
    free = [e for e in events if partition_of(e.signature.encode(), 4) != 0]
    for event in events:
        publisher.publish(event)
    while publisher.stats().acknowledged < len(free):
        await producer.until_sent(len(producer.sent) + 1)
        await asyncio.sleep(0)
    stats = await publisher.close(0.05)
    assert stats.dropped == {"closed": len(events) - len(free)}


def test_sizes_are_about_right() -> None:
    header = BatchHeader("p", 0, {})
    for topic, events in (
        (Topic.REQUESTS, [request(i, session=f"r{i}" * 20) for i in range(50)]),
        (Topic.LOGITS, [logits(i, positions=40) for i in range(20)]),
        (
            Topic.LOGITS,
            [
                logits(1, tokens=None, top_ids=None, token_bytes=("aa",) * 9, top_bytes=(("aa", "bb"),) * 9,
                       top_logprobs=((-1.0, -2.0),) * 9)
            ],
        ),
    ):  # fmt: skip
        sound = encode_sound(CODECS[topic], events, header)
        assert sound.refused == []
        estimate = sum(map(wire_bytes, events))
        assert estimate / 3 < len(sound.value) < 1.1 * estimate + 500
