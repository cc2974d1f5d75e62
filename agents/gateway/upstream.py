"""The HTTP client's side: sessions to engines, the headers that travel on, and what a failure is called.

Users' requests and mirrored copies have sessions of their own, with own connections and own limits: copies
that hang take nothing from users.
"""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, Self

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agents.gateway.asking import Asked
from agents.gateway.failures import says_out_of_memory

HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
        "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers of one connection (RFC 9110 §7.6.1), besides those that `Connection` names."""

REQUEST_ID: Final = "X-Request-Id"

_OURS_TO_ENGINE: Final = frozenset({"host", "content-length", "accept-encoding", "expect"})
"""What the gateway says to an engine itself: it reads answers, so none may be compressed."""

IDLE_S: Final = 3.0
"""How long an unused connection is kept: under the 5 s after which engines' servers (uvicorn, cpp-httplib)
hang up, so that no request meets a connection that is just being closed."""

NO_DEFAULTS: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add where the client sent none."""


def end_to_end(headers: CIMultiDictProxy[str], without: Iterable[str] = ()) -> CIMultiDict[str]:
    """The headers that travel on, in order, repeated ones too."""
    named = ",".join(headers.getall("Connection", ()))
    dropped = {*HOP_BY_HOP, *without, *(name.strip().lower() for name in named.split(",") if named)}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


@functools.lru_cache(maxsize=4096)
def _address(engine: str, path: str) -> URL:
    return URL(engine.rstrip("/") + path, encoded=True)


def address(engine: str, path: str, query: str = "") -> URL:
    """Where an engine answers a path; nothing of either is quoted again."""
    return _address(engine, path) if not query else URL(f"{engine.rstrip('/')}{path}?{query}", encoded=True)


def to_primary(
    came: CIMultiDictProxy[str], ours: frozenset[str], trace: Mapping[str, str]
) -> CIMultiDict[str]:
    """Of a user's request, to the engine that answers it. `ours`: what is meant for the gateway alone, in
    lower case; `trace`: takes the place of the client's trace context."""
    headers = end_to_end(came, _OURS_TO_ENGINE | ours)
    headers["Accept-Encoding"] = "identity"
    if trace:
        headers.popall("tracestate", None)
        headers.update(trace)
    return headers


def as_asked(asked: Asked, model: str | None) -> bytes:
    """The request's body as its user sent it, but for the model's name where the pool has its own."""
    if model is None or asked.fields.get("model") == model:
        return asked.body
    return json.dumps({**asked.fields, "model": model}).encode()


def to_shadow(authorization: str | None) -> CIMultiDict[str]:
    """Of a mirrored copy: nothing of the user's, and the pool's own credential."""
    headers = CIMultiDict({"Content-Type": "application/json", "Accept-Encoding": "identity"})
    if authorization is not None:
        headers["Authorization"] = authorization
    return headers


def to_user(
    answered: CIMultiDictProxy[str], request_id: str | None, *, same_length: bool
) -> CIMultiDict[str]:
    """Of an engine's answer, to the user. `same_length`: the body is passed on as it is."""
    headers = end_to_end(answered, () if same_length else ("content-length",))
    if request_id is not None:
        headers.setdefault(REQUEST_ID, request_id)
    headers.setdefault("Server", "klaxon")
    return headers


def session(
    *,
    most: int,
    connect_s: float,
    tls: ssl.SSLContext | None,
    kept: bool = True,
    trace_configs: Sequence[aiohttp.TraceConfig] = (),
) -> aiohttp.ClientSession:
    """A session of its own connections, `most` at a time. It waits for an answer without end: whoever asks
    bounds that. `kept`: connections are used again. Needs a running loop."""
    ssl_context: ssl.SSLContext | bool = True if tls is None else tls
    connector = (
        aiohttp.TCPConnector(limit=most, ttl_dns_cache=30, ssl=ssl_context, keepalive_timeout=IDLE_S)
        if kept
        else aiohttp.TCPConnector(limit=most, ttl_dns_cache=30, ssl=ssl_context, force_close=True)
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=NO_DEFAULTS,
        max_line_size=1 << 15,
        max_field_size=1 << 15,
        trace_configs=list(trace_configs),
    )


@dataclass(slots=True)
class _Met:
    """The connection that a request met."""

    kept: bool = False
    """Another request had it before."""


def _noting_reuse() -> aiohttp.TraceConfig:
    async def reused(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.kept = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config


class Asking:
    """Requests for answers, over kept connections.

    An engine may hang up a connection that is not in use at any moment, llama.cpp even right after an answer:
    a request that meets such a one gets no byte, and is sent once more, over a new one. An engine that hangs
    up a new one has failed, and is not asked again.
    """

    def __init__(
        self,
        *,
        most: int,
        connect_s: float,
        tls: ssl.SSLContext | None,
        on_again: Callable[[], None] = lambda: None,
    ) -> None:
        """`most`: connections of either kind at a time. Needs a running loop."""
        self._kept = session(most=most, connect_s=connect_s, tls=tls, trace_configs=(_noting_reuse(),))
        self._new = session(most=most, connect_s=connect_s, tls=tls, kept=False)
        self._on_again = on_again

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._kept.close()
        await self._new.close()

    async def ask(
        self, method: str, url: URL, *, data: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The answer, its head at least. Raises one of FAILURES."""
        met = _Met()
        try:
            return await self._kept.request(
                method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=met
            )
        except aiohttp.ClientError as error:
            if not (met.kept and hung_up(error)):
                raise
        self._on_again()
        try:
            return await self._new.request(method, url, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ClientError as error:
            if not not_connected(error):
                raise
            raise GoneError from error


class GoneError(aiohttp.ServerDisconnectedError):
    """The engine hung up a kept connection on a request, and no new one comes about: it may have ended by
    that very request, so no other engine is sent it."""


def hung_up(error: BaseException) -> bool:
    """Whether the engine closed the connection before a byte of its answer."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return False
    return isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)


def not_connected(error: BaseException) -> bool:
    """Whether no byte of a request can have reached the engine."""
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def unreachable(error: BaseException) -> bool:
    """Whether no connection to the engine comes about now, whatever it was sent before."""
    return not_connected(error) or isinstance(error, GoneError)


FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError)
"""What an exchange with an engine may raise."""


def failure_class(error: BaseException) -> str:
    """interface.md's class of an exchange that failed."""
    if not_connected(error):
        return "connect"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.InvalidURL):
        return "garbled"
    return "cut"


def status_class(status: int, head: bytes) -> str | None:
    """interface.md's class of an answer's status; None: it is no error. `head`: of its body."""
    if status < 400:
        return None
    # A 4xx may quote its request, so its words mean nothing.
    if status >= 500 and says_out_of_memory(head.decode("utf-8", "replace")):
        return "oom"
    if status in (429, 503):
        return "overload"
    return "refused" if status < 500 else "engine"
