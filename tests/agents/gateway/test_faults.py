"""Whatever breaks behind or beside the gateway, users are answered as without mirroring: the same bytes.

Each test shows that its fault happened, and what became of coverage: a mirrored request that was dropped is
reported once for each pair lost with it and has no half; a copy that failed says so.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agents.gateway import shadowing
from agents.gateway.settings import MirrorSettings
from agents.publish import DeliveryError
from schemas import codec
from schemas.topics import Topic
from tests.agents.fakes import FakeProducer
from tests.agents.gateway.harness import (
    CHAT,
    DONE,
    ROLE,
    Answer,
    Engine,
    Running,
    chunk,
    pool,
    running,
    saying,
    streaming,
    until,
    weighing,
)
from tests.agents.gateway.test_server import as_asked


@pytest.fixture(autouse=True)
def _short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that hang are given up at once at the end."""
    monkeypatch.setattr("agents.gateway.running.MIRRORS_END_S", 0.05)


PARTS = [ROLE, chunk("The"), chunk(" cat"), DONE]


def everything(**more: Any) -> MirrorSettings:
    """Every request is mirrored, whatever it costs."""
    return MirrorSettings(
        **{"rate": 1.0, "tokens_per_s": 10_000_000, "per_signature_per_minute": 1000, **more}
    )


async def alone(engine: Engine) -> tuple[int, bytes]:
    """What a user gets of the engine without any gateway."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with aiohttp.ClientSession() as client, client.post(engine.url + CHAT, json=asked) as answer:
        return answer.status, await answer.read()


async def ask_many(it: Running, number: int = 12) -> None:
    """All at once, each answered as without the gateway."""
    expected = await alone(Engine("baseline", as_asked(), url=it.engines[0].url))
    found = await asyncio.gather(*(it.ask() for _ in range(number)))
    assert found == [expected] * number
    assert it.counts("gateway_requests") == {"answered": number}


def trio(canary: Answer, **more: Any) -> list[Engine]:
    return [Engine("baseline", as_asked()), Engine("canary", canary, **more), Engine("control", as_asked())]


async def hang(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def hang_after_the_first_token(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(ROLE + chunk("The"))
    await asyncio.sleep(3600)
    return response


async def cut_after_the_first_token(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(ROLE + chunk("The"))
    assert request.transport is not None
    request.transport.close()
    return response


async def hang_up(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def no_http(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"\x00\xff garbage\r\n\r\n" * 100)
    request.transport.close()
    return web.Response()


async def odd_head(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    """A control character, which engines' heads are read with and no user's may be written with."""
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\nX-Odd: a\x01b\r\nContent-Length: 2\r\n\r\n{}")
    request.transport.close()
    return web.Response()


HUGE = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * (1 << 20) + b'"}}]}\n\n'


@pytest.mark.parametrize(
    ("canary", "told", "count"),
    [
        (saying(500, b"CUDA out of memory"), (500, "oom"), "failed"),
        (saying(503, b""), (503, "overload"), "failed"),
        (saying(400, b"no"), (400, "refused"), "failed"),
        (saying(200, b"\xff\x00 no answer"), (200, "garbled"), "failed"),
        (saying(200, b"<html>\n\n<p>nginx</p>\n\n</html>", "text/html"), (200, "garbled"), "failed"),
        (saying(200, b""), (200, "garbled"), "failed"),
        (saying(200, b"{}"), (200, None), None),
        (streaming([b"data: {garbage\n\n", DONE]), (200, "garbled"), "failed"),
        (cut_after_the_first_token, (200, "cut"), "failed"),
        (hang_up, (0, "cut"), "failed"),
        (no_http, (0, "garbled"), "failed"),
        (hang, (0, "timeout"), "timed_out"),
        (hang_after_the_first_token, (200, "timeout"), "timed_out"),
        (streaming([ROLE, HUGE, DONE]), (200, "garbled"), "failed"),
        (streaming([ROLE, chunk("The"), DONE], every_s=0.1), (200, None), "answered"),
    ],
    ids=["oom", "overload", "refused", "not-json", "html", "nothing", "empty",
         "garbage", "cut", "hangs-up", "no-http", "hangs",
         "hangs-after-a-token", "1-MB-chunk", "slow"],
)  # fmt: skip
async def test_a_canary_that_fails_costs_copies_alone(
    canary: Answer, told: tuple[int, str | None], count: str | None
) -> None:
    engines = trio(canary)
    async with running(
        engines, mirror=everything(timeout_s=2.0 if told[1] == "timeout" else 30.0, concurrency=200)
    ) as it:
        await ask_many(it)
        await until(lambda: len(it.requests()) == 36)
        copies = [one for one in it.requests() if one.arm == "canary"]
        assert Counter((one.status, one.error) for one in copies) == {told: 12}
        if count is not None:
            assert it.counts("gateway_mirrors")[count] >= 12
        # Who was asked and gave nothing is missed by what the others say; nothing is reported besides.
        halves = Counter(one.arm for one in it.logits())
        assert (halves["baseline"], halves["control"]) == (12, 12)
        assert {one.expected_arms for one in it.logits()} == {("baseline", "canary", "control")}
        assert await it.drops() == {}
        assert len(engines[1].seen) == 12


REFUSING = "http://127.0.0.1:1"
"""An address where nobody ever listens."""


async def test_a_canary_that_is_down_costs_copies_alone() -> None:
    engines = trio(streaming())
    away = REFUSING

    def pools() -> Any:
        canary = Engine("canary", streaming(), url=away)
        return (pool(engines[0]), pool(canary), pool(engines[2]))

    async with running(engines, pools, mirror=everything(concurrency=200)) as it:
        await ask_many(it)
        await until(lambda: len(it.requests()) == 36)
        copies = [one for one in it.requests() if one.arm == "canary"]
        assert {(one.status, one.error) for one in copies} == {(0, "connect")}
        assert it.counts("gateway")["engines_lost"] == 1


async def test_a_canary_that_users_are_routed_to_and_is_down_is_answered_for_by_the_baseline() -> None:
    engines = trio(streaming())
    away = REFUSING

    def pools() -> Any:
        canary = Engine("canary", streaming(), url=away)
        return (pool(engines[0]), pool(canary), pool(engines[2]))

    async with running(engines, pools, canary=100.0, mirror=everything(rate=0.0)) as it:
        await ask_many(it, 10)
        asked = it.counts("gateway_notes")["retried"]
        told = Counter((one.arm, one.status, one.error, one.shadow) for one in it.requests())
        assert told == {("canary", 502, "connect", False): asked, ("baseline", 200, None, False): 10}
        # Who comes later is not sent there for a while.
        await ask_many_more(it, 10, 10)
        assert it.counts("gateway_notes")["retried"] == asked
        assert it.counts("gateway")["engines_avoided"] == 1


async def test_with_one_of_many_engines_left_every_user_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of ten refuse: each user meets them one after the other, and those after them none."""
    engine = Engine("baseline-0", as_asked())
    others = [Engine(f"baseline-{at}", as_asked(), url=REFUSING) for at in range(1, 10)]
    async with running([engine], lambda: (pool([engine, *others]),), mirror=everything(rate=0.0)) as it:
        expected = await alone(Engine("baseline", as_asked(), url=engine.url))
        for at in range(20):
            assert await it.ask(headers={"x-session-id": f"s{at}"}) == expected
        assert it.counts("gateway_notes")["retried"] <= 9
        avoided = it.counts("gateway")["engines_avoided"]
        assert 0 < avoided == it.counts("gateway_notes")["retried"]
        assert await (await it.client.get(it.url + "/v1/models")).read()
        monkeypatch.setattr("agents.gateway.unreached.AVOIDED_US", 0)  # from now on nothing is remembered
        for at in range(20, 40):
            assert await it.ask(headers={"x-session-id": f"s{at}"}) == expected
        assert {one.node for one in it.requests()} == {"baseline-0"}


async def test_another_engine_of_the_arm_answers_for_one_that_is_down() -> None:
    engine = Engine("baseline-1", as_asked())
    away = Engine("baseline-2", as_asked(), url=REFUSING)
    async with running([engine], lambda: (pool([engine, away]),), mirror=everything(rate=0.0)) as it:
        await ask_many(it, 30)
        assert 0 < it.counts("gateway_notes")["retried"] < 30  # as many as came before the first had failed
        assert Counter((one.node, one.status) for one in it.requests()) == {("baseline-1", 200): 30}


@pytest.mark.parametrize(
    ("baseline", "status", "code", "error"),
    [
        (hang_up, 502, "upstream_unavailable", "cut"),
        (no_http, 502, "upstream_unavailable", "garbled"),
        (odd_head, 502, "upstream_unavailable", "garbled"),
        (hang, 504, "upstream_timeout", "timeout"),
    ],
)
async def test_what_no_engine_answers_is_an_error_in_openais_shape(
    baseline: Answer, status: int, code: str, error: str
) -> None:
    engine = Engine("baseline", baseline)
    silence_s = 0.3 if error == "timeout" else 60.0
    async with running([engine], mirror=everything(rate=0.0), first_byte_timeout_s=silence_s) as it:
        asked = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        mine = {"X-Request-Id": "mine-1"}
        async with it.client.post(it.url + CHAT, json=asked, headers=mine) as answer:
            found, body = answer.status, await answer.read()
            assert answer.headers["X-Request-Id"] == "mine-1"
        told = json.loads(body)["error"]
        assert (found, told["code"], told["type"]) == (status, code, "server_error")
        assert "127.0.0.1" not in body.decode()
        (event,) = it.requests()
        assert (event.status, event.error) == (status, error)
        assert len(engine.seen) == 1  # bytes were sent: it is never asked twice


async def test_without_any_engine_users_are_told_so() -> None:
    engine = Engine("baseline", streaming(), url=REFUSING)
    async with running([], lambda: (pool(engine),), mirror=everything(rate=0.0)) as it:
        found, body = await it.ask()
        assert (found, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable")
        assert [(one.status, one.error) for one in it.requests()] == [(502, "connect")]


@pytest.mark.parametrize(
    ("baseline", "error"), [(cut_after_the_first_token, "cut"), (hang_after_the_first_token, "timeout")]
)
async def test_an_answer_that_breaks_off_ends_without_an_end(baseline: Answer, error: str) -> None:
    async with running([Engine("baseline", baseline)], mirror=everything(rate=0.0), idle_timeout_s=0.3) as it:
        asked = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        async with it.client.post(it.url + CHAT, json=asked) as answer:
            assert answer.status == 200
            got = await answer.content.readany()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert got.startswith(ROLE)
        await until(it.requests)
        (event,) = it.requests()
        assert (event.status, event.error, event.output_tokens > 0) == (200, error, True)
        assert it.counts("gateway_requests") == {"cut": 1}


@pytest.mark.parametrize("mirrored", [False, True])
async def test_a_user_who_hangs_up_mid_stream_ends_the_engines_work(mirrored: bool) -> None:
    engines = trio(streaming(PARTS))
    engines[0].answer = hang_after_the_first_token
    async with running(engines, mirror=everything(rate=float(mirrored))) as it:
        asked = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        async with aiohttp.ClientSession() as user:
            answer = await user.post(it.url + CHAT, json=asked)
            assert (await answer.content.readany()).startswith(ROLE)
            answer.close()
        await until(lambda: engines[0].cancelled == 1)
        await until(lambda: [one for one in it.requests() if not one.shadow])
        (event,) = [one for one in it.requests() if not one.shadow]
        assert (event.status, event.error, event.output_tokens > 0) == (499, "client", True)
        assert it.counts("gateway_requests") == {"client_gone": 1}
        if mirrored:  # copies are apart from it
            await until(lambda: len(it.requests()) == 3)
            assert {one.error for one in it.requests() if one.shadow} == {None}


async def test_a_user_who_hangs_up_before_the_answer_ends_the_engines_work() -> None:
    engine = Engine("baseline", hang)
    async with running([engine], mirror=everything(rate=0.0)) as it:
        asking = asyncio.create_task(it.ask())
        await until(lambda: engine.under_way)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: engine.cancelled == 1)
        await until(it.requests)
        assert (it.requests()[0].status, it.requests()[0].error) == (499, "client")


async def test_500_stuck_mirrors_take_nothing_from_users() -> None:
    engines = trio(hang)
    async with running(engines, mirror=everything(concurrency=1000, queue=1000, timeout_s=60)) as it:
        await asyncio.gather(*(it.ask() for _ in range(500)))
        await until(lambda: engines[1].under_way == 500)
        expected = await alone(Engine("baseline", as_asked(), url=engines[0].url))
        assert [await it.ask() for _ in range(10)] == [expected] * 10
        assert it.counts("gateway")["mirrors_running"] >= 500
        assert it.counts("gateway_requests") == {"answered": 510}


async def test_a_full_queue_lowers_coverage_once_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "WAIT_S", 0.3)
    engines = trio(hang)
    async with running(engines, mirror=everything(concurrency=4, queue=5, timeout_s=60)) as it:
        await asyncio.gather(*(it.ask() for _ in range(40)))
        await until(lambda: it.counts("gateway_mirrors").get("overdue"))
        mirrors = it.counts("gateway_mirrors")
        assert it.counts("gateway_requests") == {"answered": 40}
        await until(lambda: not it.counts("gateway").get("mirrors_waiting"))
        mirrors = it.counts("gateway_mirrors")
        dropped = mirrors["queue_full"] + mirrors["overdue"]
        assert mirrors["queue_full"] > 0
        assert mirrors["mirrored"] == 40
        assert await it.drops() == {"r/canary": dropped, "r/control": dropped}
        halves = Counter(one.arm for one in it.logits())
        await until(lambda: len(engines[1].seen) >= 40 - dropped)
        assert halves["baseline"] == 40 - dropped == len(engines[1].seen)


async def test_mirrors_that_wait_at_the_end_are_reported() -> None:
    engines = trio(hang)
    async with running(engines, mirror=everything(concurrency=2, timeout_s=60)) as it:
        await asyncio.gather(*(it.ask() for _ in range(10)))
        assert it.counts("gateway")["mirrors_waiting"] == 9
        stopping = asyncio.create_task(it.stop())
        await until(lambda: it.counts("gateway_mirrors").get("stopped", 0) >= 9)
        for task in (one for one in asyncio.all_tasks() if "_copy" in str(one.get_coro())):
            task.cancel()
        await stopping
        assert it.drops_sent() == {"r/canary": 9, "r/control": 9}
        assert Counter(one.error for one in it.requests() if one.arm == "canary") == {"stopped": 1}


class Away(FakeProducer):
    """A broker that may be away."""

    away = False
    refused = 0

    async def send(self, *arguments: Any) -> None:
        if self.away:
            type(self).refused += 1
            raise DeliveryError("nobody there")
        await super().send(*arguments)


async def test_kafka_away_costs_events_alone_and_every_one_is_told() -> None:
    """A minute's absence on a shortened clock: batches are given up after 0.1 s in place of 30 s."""
    producer = Away(partition_count=2)
    engines = trio(as_asked())
    publishing = {"retry_first_us": 5_000, "retry_most_us": 20_000, "give_up_us": 100_000}
    async with running(engines, producer=producer, publishing=publishing, mirror=everything()) as it:
        await ask_many(it, 10)
        await until(lambda: len(it.logits()) == 30)
        assert await it.publisher.drain(10)
        producer.away = True
        for _ in range(10):
            await asyncio.gather(*(it.ask() for _ in range(5)))
            await asyncio.sleep(0.03)
        await until(lambda: it.publisher.stats().dropped.get("undeliverable"))
        producer.away = False
        await ask_many_more(it, 60, 10)
        await until(lambda: len(it.logits()) == 210)
        assert await it.publisher.drain(10)
        stats = it.publisher.stats()
        assert Away.refused > 0
        assert stats.accepted == stats.acknowledged + stats.dropped["undeliverable"] == 420
        # The last header that tells some may be on its way yet: it is no event that is waited for.
        await until(lambda: told_missing(producer.sent)[0] == stats.dropped["undeliverable"])
        assert told_missing(producer.sent) == (stats.dropped["undeliverable"],) * 2


async def ask_many_more(it: Running, before: int, number: int) -> None:
    await asyncio.gather(*(it.ask() for _ in range(number)))
    assert it.counts("gateway_requests") == {"answered": before + number}


def told_missing(sent: Sequence[Any]) -> tuple[int, int]:
    """Drops that headers report, and events that are missing of those that were accepted."""
    reported = events = 0
    for one in sent:
        decode = codec.decode_requests if one.topic == Topic.REQUESTS.value else codec.decode_logits
        decoded = decode(one.value, one.headers["content-type"].decode())
        reported += sum(decoded.header.dropped.values())
        events += decoded.columns.n
    return reported, 420 - events


async def test_gaps_in_batch_numbers_are_batches_whose_events_were_reported() -> None:
    producer = Away(partition_count=1)
    publishing = {"retry_first_us": 5_000, "retry_most_us": 5_000, "give_up_us": 10_000}
    engine = Engine("baseline", as_asked())
    mirror = everything(rate=0.0)
    async with running([engine], producer=producer, publishing=publishing, mirror=mirror) as it:
        for away in (False, True, False, True, True, False):
            producer.away = away
            before = it.publisher.stats().dropped.get("undeliverable", 0)
            await it.ask()
            await until(lambda: not it.publisher.stats().queued_events)
            assert it.publisher.stats().dropped.get("undeliverable", 0) == before + away
        assert await it.publisher.drain(10)
        headers = [
            codec.decode_requests(one.value, one.headers["content-type"].decode()).header
            for one in producer.sent
        ]
        numbers = [header.sequence for header in headers if header is not None]
        told = sum(sum(header.dropped.values()) for header in headers if header is not None)
        gaps = set(range(max(numbers) + 1)) - set(numbers)
        assert numbers == sorted(numbers)
        assert len(gaps) >= 3
        assert told == it.publisher.stats().dropped["undeliverable"] == 3


async def test_a_silent_control_topic_ends_at_the_promoted_split_and_users_notice_nothing() -> None:
    """When the router tells it so: tests/agents/test_router_core.py. Here, what comes of it."""
    engines = trio(as_asked())
    async with running(engines, canary=100.0, mirror=everything()) as it:
        await ask_many(it, 5)
        silent = weighing(0.0)
        it.gateway.obey(silent)
        await ask_many_more(it, 5, 5)
        await until(lambda: len(it.requests()) == 30)
        served = [one.arm for one in it.requests() if not one.shadow]
        assert served == ["canary"] * 5 + ["baseline"] * 5
        it.gateway.forget()
        await ask_many_more(it, 10, 5)
        await until(lambda: len(it.requests()) == 35)  # nothing is mirrored that no directive speaks of
        assert [one.arm for one in it.requests() if not one.shadow][10:] == ["baseline"] * 5
