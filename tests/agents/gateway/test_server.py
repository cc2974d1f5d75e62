"""What users and engines see of each other through the gateway, and what is said of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from agents.gateway.running import ListenError
from agents.gateway.settings import MirrorSettings
from tests.agents.gateway.harness import (
    CHAT,
    DONE,
    ROLE,
    WORDS,
    Engine,
    chunk,
    chunks,
    running,
    saying,
    streaming,
    until,
    weighing,
)

NOTHING = MirrorSettings(rate=0.0)
PLAIN_CHUNKS = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"The"},"logprobs":null,"finish_reason":null}]}'
)


def trio() -> list[Engine]:
    return [Engine(arm, streaming()) for arm in ("baseline", "canary", "control")]


def as_asked(answer: Any = None) -> Any:
    """An engine that adds log-probabilities, ids and usage only where they are asked for, as engines do."""
    whole = answer or chunks()

    async def answered(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        parts = []
        for part in whole:
            usage = b'"usage"' in part
            if usage and not (body.get("stream_options") or {}).get("include_usage"):
                continue
            if part.startswith(b"data: {") and not usage:
                read = json.loads(part[6:])
                for choice in read["choices"]:
                    for asked, name in (("logprobs", "logprobs"), ("return_token_ids", "token_ids")):
                        if name in choice and not body.get(asked):
                            choice[name] = None
                part = b"data: " + json.dumps(read, separators=(",", ":")).encode() + b"\n\n"
            parts.append(part)
        return await streaming(parts)(request, body)

    return answered


async def test_a_mirrored_request_is_answered_as_unmirrored_and_every_arm_is_published() -> None:
    engines = [Engine(arm, as_asked()) for arm in ("baseline", "canary", "control")]
    async with running(engines) as it, aiohttp.ClientSession() as direct:
        asked = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with direct.post(engines[0].url + CHAT, json=asked) as answer:
            without = await answer.read()
        status, body = await it.ask(seed=7, temperature=0.5)
        assert (status, body) == (200, without)
        await until(lambda: len(it.requests()) == 3 and len(it.logits()) == 3)
        requests, logits = it.requests(), it.logits()
    assert {(one.arm, one.shadow) for one in requests} == {
        ("baseline", False), ("canary", True), ("control", True),
    }  # fmt: skip
    assert {one.arm for one in logits} == {"baseline", "canary", "control"}
    assert {one.expected_arms for one in logits} == {("baseline", "canary", "control")}
    (pair,) = {one.pair_id for one in (*requests, *logits)}
    assert pair is not None
    assert len(pair) == 32
    assert len({one.signature for one in (*requests, *logits)}) == 1
    assert len({(*map(tuple, [one.token_bytes or one.tokens]),) for one in logits}) == 1  # type: ignore[arg-type]
    for one in requests:
        assert (one.status, one.error, one.output_tokens, one.input_tokens) == (200, None, 7, 3)
        assert (one.finish_reason, one.stream, one.generation, one.engine) == ("stop", True, 1, "vllm")
        assert one.ttft_us is not None
        assert 0 < one.ttft_us <= one.duration_us
    for engine in engines[1:]:
        (body_of_copy,) = engine.bodies
        assert (body_of_copy["seed"], body_of_copy["temperature"]) == (7, 0.5)
        assert body_of_copy["logprobs"] is True


async def test_the_canary_is_mirrored_to_the_baseline() -> None:
    engines = trio()
    async with running(engines, canary=100.0) as it:
        await it.ask()
        await until(lambda: len(it.logits()) == 3)
        assert {(one.arm, one.shadow) for one in it.requests()} == {
            ("canary", False), ("baseline", True), ("control", True),
        }  # fmt: skip
        assert {one.model_version for one in it.requests() if one.arm == "canary"} == {"v2"}


async def test_directives_move_requests_and_sessions_stay() -> None:
    engines = trio()
    async with running(engines, mirror=NOTHING) as it:
        sessions = [f"s{number}" for number in range(40)]

        async def arms() -> list[str]:
            before = len(it.requests())
            for session in sessions:
                await it.ask(headers={"X-Session-Id": session})
            return [one.arm for one in it.requests()[before:]]

        assert set(await arms()) == {"baseline"}
        it.gateway.obey(weighing(50.0, generation=2))
        half = await arms()
        assert half.count("canary") in range(8, 33)
        assert await arms() == half
        assert it.requests()[-1].generation == 2
        it.gateway.obey(weighing(100.0, generation=3))
        assert set(await arms()) == {"canary"}
        it.gateway.forget()
        assert set(await arms()) == {"baseline"}


async def test_what_belongs_to_one_connection_or_to_the_gateway_goes_no_further() -> None:
    engines = trio()
    async with running(engines) as it:
        headers = {
            "Authorization": "Bearer user-secret",
            "X-Request-Id": "mine-1",
            "X-Session-Id": "s1",
            "X-Klaxon-Tenant": "t1",
            "X-Klaxon-Consent": "c",
            "Cookie": "a=b",
            "X-Private": "1",
            "X-Private-Too": "1",
            "TE": "trailers",
            "Proxy-Authorization": "Basic x",
            "Keep-Alive": "timeout=5",
            "Accept-Encoding": "gzip, br",
            "X-Other": "kept",
        }
        body = json.dumps({"messages": [{"role": "user", "content": "q"}], "stream": True})
        named = (("Connection", "keep-alive, X-Private"), ("Connection", "x-private-too"))
        sent = CIMultiDict((*headers.items(), *named))
        async with it.client.post(it.url + CHAT, data=body, headers=sent) as answer:
            await answer.read()
            assert answer.headers["X-Request-Id"] == "mine-1"
            assert answer.headers["X-Engine"] == "e"
        await until(lambda: len(it.requests()) == 3)
        to_user, *copies = (engine.seen[0].headers for engine in engines)
        events = it.publisher.events
    assert to_user["Authorization"] == "Bearer user-secret"
    assert to_user["X-Request-Id"] == "mine-1"
    assert to_user["X-Other"] == "kept"
    assert to_user["Accept-Encoding"] == "identity"
    assert to_user["Host"] in engines[0].url
    gone = ("X-Private", "X-Private-Too", "TE", "Proxy-Authorization", "Keep-Alive", "X-Session-Id")
    assert [name for name in (*gone, "X-Klaxon-Tenant", "X-Klaxon-Consent") if name in to_user] == []
    for copy in copies:
        assert [
            name for name in (*headers, "X-Klaxon-Pair") if name in copy and name != "Accept-Encoding"
        ] == []
        assert "user-secret" not in str(copy)
    for event in events:
        assert "user-secret" not in str(event)
        assert "mine-1" not in str(event)
        assert event.pair_id not in ("mine-1", None)
    assert {event.tenant for event in events} != {"t1"}
    assert len({event.tenant for event in events}) == 1


async def test_a_pool_has_its_own_credential_for_copies() -> None:
    engines = trio()
    async with running(engines, credentials={"canary": "Bearer pool-key"}) as it:
        await it.ask(headers={"Authorization": "Bearer user"})
        await until(lambda: len(it.requests()) == 3)
        canary, control = (engine.seen[0] for engine in engines[1:])
        assert canary.headers["Authorization"] == "Bearer pool-key"
        assert "Authorization" not in control.headers


@pytest.mark.parametrize(
    "path",
    ["/slots", "/v1/load_lora_adapter", "/sleep", "/metrics", "/v1/embeddings", "/", "/v1/chat/completions/x",
     "/v1/models/../../slots", "/v1/models/%2e%2e/slots", "/v1/models/", "/v1/models//x", "/healthz"],
)  # fmt: skip
async def test_other_paths_are_not_found(path: str) -> None:
    engine = Engine("baseline", streaming())
    async with running([engine], mirror=NOTHING) as it:
        for method in ("GET", "POST"):
            url, mine = URL(it.url + path, encoded=True), {"X-Request-Id": "mine-1"}
            async with it.client.request(method, url, headers=mine) as answer:
                assert (answer.status, answer.headers["X-Request-Id"]) == (404, "mine-1")
                error = (await answer.json())["error"]
                assert error["type"] == "invalid_request_error"
                assert set(error) == {"message", "type", "param", "code"}
        assert engine.seen == []
        assert it.counts("gateway_requests") == {"not_found": 2}


async def test_models_are_the_engines() -> None:
    said = b'{"object":"list","data":[{"id":"org/m"}]}'
    engine = Engine("baseline", saying(200, said))
    async with running([engine], mirror=NOTHING) as it:
        for path in ("/v1/models", "/v1/models/org/m", "/v1/models/org%2Fm?x=1"):
            async with it.client.get(it.url + path) as answer:
                assert (answer.status, await answer.read()) == (200, said)
        async with it.client.post(it.url + "/v1/models", json={}) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET")
        async with it.client.get(it.url + CHAT) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_a_body_over_the_limit_is_refused_and_one_at_it_is_not() -> None:
    engine = Engine("baseline", streaming())
    async with running([engine], mirror=NOTHING, body_bytes=2048) as it:

        async def send(size: int, *, chunked: bool) -> int:
            body = json.dumps({"messages": [{"role": "user", "content": ""}], "stream": True})
            body = body.replace('""', '"' + "x" * (size - len(body)) + '"')
            assert len(body) == size

            async def parts() -> Any:
                yield body.encode()

            data: Any = parts() if chunked else body
            async with it.client.post(it.url + CHAT, data=data) as answer:
                if answer.status != 200:
                    assert (await answer.json())["error"]["code"] == "request_too_large"
                return answer.status

        for chunked in (False, True):
            assert [await send(size, chunked=chunked) for size in (2047, 2048, 2049)] == [200, 200, 413]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, b'{"error": {"message":  "odd  spacing"}}'),
        (401, b"no"),
        (429, b"{}"),
        (500, b"\xff\x00"),
        (503, b""),
    ],
)
async def test_errors_of_engines_pass_byte_for_byte(status: int, said: bytes) -> None:
    engine = Engine("baseline", saying(status, said))
    async with running([engine], mirror=NOTHING) as it:
        assert await it.ask() == (status, said)
        (event,) = it.requests()
        known = {400: "refused", 401: "refused", 429: "overload", 500: "engine", 503: "overload"}
        assert (event.status, event.error) == (status, known[status])


async def test_an_engine_that_refuses_what_was_added_is_asked_as_the_user_had() -> None:
    async def strict(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "logprobs" in body or "stream_options" in body:
            return web.Response(status=400, text="logprobs is not supported with tools + stream")
        return await streaming([ROLE, PLAIN, DONE])(request, body)

    engines = [Engine("baseline", strict), Engine("canary", streaming())]
    async with running(engines) as it:
        assert await it.ask(tools=[]) == (200, ROLE + PLAIN + DONE)
        assert it.counts("gateway_notes") == {"asked_plain": 1}
        await until(lambda: len(it.requests()) == 2)
        assert {one.arm for one in it.logits()} == {"canary"}
        assert it.counts("gateway_no_logits") == {"no_answer": 1}
        # What its user did wrong is answered as without the gateway.
        engines[0].answer = saying(400, b'{"error":"yours"}')
        assert await it.ask() == (400, b'{"error":"yours"}')


PLAIN = b"data: " + PLAIN_CHUNKS + b"\n\n"


async def test_what_is_not_understood_passes_untouched() -> None:
    engine = Engine("baseline", saying(200, b"odd"))

    async def echo(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=request.raw_path.encode() + b" " + engine.raw[-1])

    engine.answer = echo
    async with running([engine], mirror=NOTHING) as it:
        for body in (b"", b"not json", b"[1]", b'{"messages": "\xff"}', b'"x"'):
            async with it.client.post(it.url + CHAT + "?a=%20b", data=body) as answer:
                assert (answer.status, await answer.read()) == (200, b"/v1/chat/completions?a=%20b " + body)
        assert it.counts("gateway_notes") == {"not_understood": 5}
        assert it.requests() == []


async def test_an_answer_that_is_no_stream_is_whole_and_has_its_length() -> None:
    message = {"role": "assistant", "content": "The cat"}
    entries = [
        {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": []}
        for word in WORDS[:2]
    ]
    choice = {"index": 0, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    said = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    engine = Engine("baseline", saying(200, json.dumps(said).encode()))
    async with running([engine, Engine("canary", streaming())]) as it:
        asked = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
        async with it.client.post(it.url + CHAT, json=asked) as answer:
            body = await answer.read()
            assert answer.headers["Content-Length"] == str(len(body))
        choice["logprobs"] = None  # type: ignore[assignment]
        assert json.loads(body) == said
        await until(lambda: len(it.requests()) == 2)
        (event,) = [one for one in it.requests() if not one.shadow]
        assert (event.output_tokens, event.ttft_us, event.stream) == (2, None, False)


async def test_the_first_byte_does_not_wait_for_the_second() -> None:
    more = asyncio.Event()

    async def slow(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + chunk("The"))
        await more.wait()
        await response.write(chunk(" cat") + DONE)
        return response

    async with running([Engine("baseline", slow)], mirror=NOTHING) as it:
        asked = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        async with it.client.post(it.url + CHAT, json=asked) as answer:
            first = await answer.content.readany()
            assert first.startswith(ROLE)
            assert not more.is_set()
            more.set()
            await answer.read()


async def test_a_slow_user_holds_up_the_engine_and_nothing_is_piled_up() -> None:
    part = chunk("The")
    sent = 0

    async def endless(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(part * 100)
            sent += 100 * len(part)

    engine = Engine("baseline", endless)
    async with running([engine], mirror=NOTHING) as it:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(it.url.rpartition(":")[2]), limit=1024
        )
        body = json.dumps({"messages": [{"role": "user", "content": "q"}], "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        assert await reader.read(10) == b"HTTP/1.1 2"
        before = -1
        while sent != before or not sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 64 << 20  # sockets' buffers, and a few reads
        writer.close()
        await until(lambda: engine.cancelled == 1)
        await until(lambda: it.requests())
        assert (it.requests()[0].status, it.requests()[0].error) == (499, "client")


async def test_it_listens_where_nothing_else_does() -> None:
    async with running([Engine("baseline", streaming())], mirror=NOTHING) as it:
        port = int(it.url.rpartition(":")[2])
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with running([Engine("baseline", streaming())], mirror=NOTHING, port=port):
                pass


async def test_at_the_end_what_is_under_way_is_answered_and_published() -> None:
    engine = Engine("baseline", streaming(every_s=0.02))
    asking: asyncio.Task[tuple[int, bytes]] | None = None
    async with running([engine], mirror=NOTHING) as it:
        asking = asyncio.create_task(it.ask())
        await until(lambda: engine.under_way)
        await it.stop()
        status, body = await asking
        assert status == 200
        assert body.endswith(DONE)
        assert len(it.requests()) == 1
        assert it.publisher.stats().acknowledged == 1
        with pytest.raises(aiohttp.ClientConnectorError):
            await it.ask()
