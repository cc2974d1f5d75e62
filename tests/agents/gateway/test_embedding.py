"""Embeddings: which pairs, what is asked, what is left out, and that no text goes where it must not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway import embedding
from agents.gateway.embedding import HttpEmbedder, NoEmbedder, embedder_of, embedding_of
from agents.gateway.settings import EmbeddingSettings
from tests.agents.gateway.answering import Answer, answering


def settings(url: str = "http://127.0.0.1:1", **more: Any) -> EmbeddingSettings:
    return EmbeddingSettings(**{"url": url, "model": "bge-small", "trusted": True} | more)


@asynccontextmanager
async def embedder(url: str = "http://127.0.0.1:1", **more: Any) -> AsyncIterator[HttpEmbedder]:
    """Closed at the end, however a test ends: one that fails costs no other."""
    authorization = more.pop("authorization", None)
    one = HttpEmbedder(settings(url, **more), authorization=authorization)
    try:
        yield one
    finally:
        await one.close()


def said(*numbers: object) -> dict[str, Any]:
    data = [{"object": "embedding", "index": 0, "embedding": list(numbers)}]
    return {"object": "list", "data": data, "model": "bge-small"}


def test_off_unless_configured() -> None:
    off = embedder_of(EmbeddingSettings())
    assert isinstance(off, NoEmbedder)
    assert not off.wants("p", consented=True)
    assert isinstance(embedder_of(settings()), HttpEmbedder)
    assert set(off.gauges()) == set(embedder_of(settings()).gauges())


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_pairs_are_sampled_by_their_id_alone(rate: float) -> None:
    """Another gateway, or the same after a restart, samples the same."""
    one, other = HttpEmbedder(settings(rate=rate)), HttpEmbedder(settings(rate=rate))
    wanted = [one.wants(f"pair-{at}", consented=False) for at in range(2_000)]
    assert wanted == [other.wants(f"pair-{at}", consented=True) for at in range(2_000)]
    assert abs(sum(wanted) / 2_000 - rate) < 0.03
    if rate in (0.0, 1.0):
        assert sum(wanted) == rate * 2_000


def test_outside_the_trust_boundary_consent_is_needed() -> None:
    one = HttpEmbedder(settings(rate=1.0, trusted=False))
    assert not one.wants("p", consented=False)
    assert one.wants("p", consented=True)
    assert not EmbeddingSettings().trusted, "unless somebody says so"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/embeddings", "/prefix/v1"])
async def test_what_is_asked(path: str) -> None:
    seen: list[tuple[str, str | None, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("authorization"), await request.json()))
        return web.json_response(said(0.25, -1, 1e-9))

    async with answering(answer) as (_, url, _), embedder(url + path, authorization="Bearer e") as one:
        assert await one.embed("The cat sat.\ud800") == (0.25, -1.0, 1e-9)
    prefix = "/prefix" if path.startswith("/prefix") else ""
    body = {"model": "bge-small", "input": "The cat sat.\ud800", "encoding_format": "float"}
    assert seen == [(f"{prefix}/v1/embeddings", "Bearer e", body)]
    assert one.gauges()["embeddings_made"] == 1


async def test_long_texts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "MOST_CHARS", 10)
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((await request.json())["input"])
        return web.json_response(said(1))

    async with answering(answer) as (_, url, _), embedder(url) as one:
        await one.embed("é" * 11)
    assert seen == ["é" * 10]


@pytest.mark.parametrize(
    ("numbers", "dimensions"),
    [([0.5] * 4096, 4096), ([0.5] * 4097, None), ([], None), ([0.5], 1)],
)
def test_dimensions(numbers: list[float], dimensions: int | None) -> None:
    found = embedding_of(said(*numbers))
    assert (None if found is None else len(found)) == dimensions


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e400, 10**400, True, None, "1", [1]])
def test_values_that_are_none(bad: Any) -> None:
    assert embedding_of(said(0.5, bad)) is None


def test_six_digits_are_kept() -> None:
    assert embedding_of(said(0.123456789, -123456.789)) == (0.123457, -123457.0)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["data", "embedding"]), inner, max_size=2)
        ),
        max_leaves=8,
    )
)
def test_any_answer_is_read(answer: object) -> None:
    found = embedding_of(answer)
    assert found is None or all(isinstance(one, float) for one in found)


async def _huge(request: web.Request) -> web.Response:
    return web.Response(body=b" " * (embedding.MOST_BYTES + 1))


def _raw(body: bytes, status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    return answer


REFUSED = _raw(json.dumps(said(1)).encode(), status=500)


@pytest.mark.parametrize("answer", [_huge, _raw(b"<html>"), _raw(b"[" * 100_000), _raw(b"\xff"), REFUSED])
async def test_what_is_no_embedding_fails(answer: Answer) -> None:
    async with answering(answer) as (_, url, _), embedder(url) as one:
        assert await one.embed("text") is None
    assert one.gauges() | {"embeddings_failed": 0} == NoEmbedder().gauges()
    assert one.gauges()["embeddings_failed"] == 1


async def test_an_endpoint_that_is_away_or_redirects_fails() -> None:
    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/")

    async with embedder() as one:
        assert await one.embed("text") is None
    async with answering(elsewhere) as (_, url, asked), embedder(url) as other:
        assert await other.embed("text") is None
    assert asked == ["/v1/embeddings"]
    assert one.gauges()["embeddings_failed"] == other.gauges()["embeddings_failed"] == 1


async def test_a_slow_endpoint_costs_the_time_agreed_and_what_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedding, "MOST_WAITING", 3)
    released = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await released.wait()
        return web.json_response(said(1))

    async with answering(answer) as (_, url, asked), embedder(url, concurrency=2, timeout_s=1.5) as one:
        found = await asyncio.gather(*(one.embed(f"text {at}") for at in range(8)))
        assert found == [None] * 8
        assert len(asked) == 2
        assert one.gauges() == {
            "embeddings_under_way": 0,
            "embeddings_waiting": 0,
            "embeddings_made": 0,
            "embeddings_full": 3,
            "embeddings_timed_out": 5,
            "embeddings_failed": 0,
        }
        released.set()
        assert await one.embed("text") == (1.0,)
    assert await one.embed("text") is None, "closed"
