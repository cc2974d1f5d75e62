# ruff: noqa: ARG002  (null objects use none of their arguments)
"""Embeddings of sampled pairs' answers, from one configured endpoint; never in a user's way.

The text leaves the process to that endpoint only. Where it is not inside the operator's own trust boundary
(`gateway.embeddings.trusted`), only answers of consented requests are sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import ssl
from collections import Counter
from typing import Final, Literal, Protocol

import aiohttp

from agents.gateway.settings import EmbeddingSettings

Embedding = tuple[float, ...]
LeftOut = Literal["full", "timed_out", "failed"]

MOST_WAITING: Final = 256
"""Texts that wait for their turn; further ones go without."""
MOST_CHARS: Final = 32_768
"""Of a text; longer ones are cut there, on all arms alike."""
MOST_DIMENSIONS: Final = 4_096
MOST_BYTES: Final = 1 << 20
"""Of an answer."""
DIGITS: Final = 6
"""Significant ones that are kept: cosines differ by less than a millionth."""


class Embedder(Protocol):
    """Texts to embeddings, at most so many at a time and so long."""

    def wants(self, pair_id: str, *, consented: bool) -> bool:
        """Whether this pair is sampled: the same for all its arms, without anything remembered."""
        ...

    async def embed(self, text: str) -> Embedding | None:
        """None: no room, no answer in time, none that fits an event; counted by reason. Never raises."""
        ...

    def gauges(self) -> dict[str, int]:
        """Requests under way and waiting, embeddings, and what was left out by reason."""
        ...

    async def close(self) -> None:
        """Ask no more."""
        ...


class NoEmbedder:
    """Embeddings are off, as they are unless configured."""

    __slots__ = ()

    def wants(self, pair_id: str, *, consented: bool) -> bool:
        return False

    async def embed(self, text: str) -> Embedding | None:
        return None

    def gauges(self) -> dict[str, int]:
        return _gauges(0, 0, 0, Counter())

    async def close(self) -> None:
        return None


class HttpEmbedder:
    """Asks an OpenAI-compatible `/v1/embeddings`. Use from one event loop."""

    def __init__(
        self,
        settings: EmbeddingSettings,
        *,
        authorization: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`settings.url` and `model` are set. `authorization`: the header, whole. `tls` None: as the system
        trusts."""
        assert settings.url is not None
        self._url = settings.url.rstrip("/").removesuffix("/v1/embeddings").removesuffix("/v1")
        self._settings = settings
        self._below = int(settings.rate * 2**64)
        self._headers = {"content-type": "application/json"}
        if authorization is not None:
            self._headers["authorization"] = authorization
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._turn = asyncio.Semaphore(settings.concurrency)
        self._waiting = 0
        self._under_way = 0
        self._made = 0
        self._left_out: Counter[LeftOut] = Counter()
        self._closed = False

    def wants(self, pair_id: str, *, consented: bool) -> bool:
        """By a hash of its id."""
        if not consented and not self._settings.trusted:
            return False
        digest = hashlib.sha256(b"embedding " + pair_id.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8]) < self._below

    async def embed(self, text: str) -> Embedding | None:
        """At most `timeout_s`, waiting for its turn included."""
        if self._closed or self._waiting >= MOST_WAITING:
            self._left_out["full"] += 1
            return None
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                self._waiting += 1
                try:
                    await self._turn.acquire()
                finally:
                    self._waiting -= 1
                self._under_way += 1
                try:
                    found = await self._ask(text[:MOST_CHARS])
                finally:
                    self._under_way -= 1
                    self._turn.release()
        except TimeoutError:
            self._left_out["timed_out"] += 1
            return None
        except (aiohttp.ClientError, OSError, ValueError, RecursionError):
            found = None
        if found is None:
            self._left_out["failed"] += 1
        else:
            self._made += 1
        return found

    def gauges(self) -> dict[str, int]:
        """Since the start, and now."""
        return _gauges(self._under_way, self._waiting, self._made, self._left_out)

    async def close(self) -> None:
        """Those under way fail."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _ask(self, text: str) -> Embedding | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._settings.concurrency, ssl=True if self._tls is None else self._tls
                ),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        body = json.dumps({"model": self._settings.model, "input": text, "encoding_format": "float"})
        async with self._session.post(
            self._url + "/v1/embeddings", data=body, headers=self._headers, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                return None
            data = bytearray()
            async for part in answer.content.iter_any():
                data += part
                if len(data) > MOST_BYTES:
                    return None
        return embedding_of(json.loads(data))


def embedding_of(answer: object) -> Embedding | None:
    """The first embedding of an answer, rounded; None: there is none that an event can hold."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    numbers = first.get("embedding") if isinstance(first, dict) else None
    if not isinstance(numbers, list) or not 0 < len(numbers) <= MOST_DIMENSIONS:
        return None
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
        return None
    try:
        found = tuple(float(f"{float(one):.{DIGITS}g}") for one in numbers)
    except OverflowError:
        return None
    return found if all(map(math.isfinite, found)) else None


def embedder_of(
    settings: EmbeddingSettings, *, authorization: str | None = None, tls: ssl.SSLContext | None = None
) -> Embedder:
    """As configured."""
    if settings.url is None:
        return NoEmbedder()
    return HttpEmbedder(settings, authorization=authorization, tls=tls)


def _gauges(under_way: int, waiting: int, made: int, left_out: Counter[LeftOut]) -> dict[str, int]:
    return {
        "embeddings_under_way": under_way,
        "embeddings_waiting": waiting,
        "embeddings_made": made,
        "embeddings_full": left_out["full"],
        "embeddings_timed_out": left_out["timed_out"],
        "embeddings_failed": left_out["failed"],
    }
