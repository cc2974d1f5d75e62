"""Fifty secrets in prompts, answers and headers, and none of them in anything that leaves the gateway.

What leaves: records of every topic, log lines, spans, metrics. Tokens of those who did not consent cannot be
told without the key, and can with it. A gateway that publishes plain bytes or plain ids is caught.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from yarl import URL

from agents.gateway.consent import Consents, Refusal, consent_bytes
from agents.gateway.otel_spans import OtelSpans
from agents.gateway.pseudonyms import PairPseudonyms, Pseudonyms
from agents.gateway.running import Keys
from agents.gateway.sealing import Belongs, Sealing, open_sealed
from agents.gateway.settings import SpanSettings
from agents.gateway.signature import PromptSigner
from pipeline.monitoring.exposition import Snapshot, exposition
from pipeline.monitoring.lines import Lines
from schemas.codec import decode_logits, decode_requests
from schemas.events import LogitEvent
from schemas.identity import token_hash
from schemas.signing import Signer, Trust, TrustedKey, Use
from schemas.topics import Topic
from tests.agents.gateway.harness import CHAT, Engine, Running, running, until
from tests.agents.gateway.spilling import (
    ANSWERS,
    FAULTS,
    FIFTY,
    HEADERS,
    IDS,
    answering,
    bodies,
    failing,
    send_broken,
)
from tests.monitoring.test_secrets import CANARY, leaks, secret

PSEUDONYM_KEY = bytes(range(32))
TEXT_KEY = bytes(range(32, 64))
ISSUER = Signer(bytes(range(1, 33)))


def consented(session: str, consent_id: str = "c-1") -> str:
    expires_us = time.time_ns() // 1000 + 60_000_000
    signature = ISSUER._key.sign(consent_bytes(consent_id, session, expires_us))
    return f"{consent_id};{expires_us};{ISSUER.key_id}:{base64.b64encode(signature).decode()}"


@dataclass
class Left:
    """Everything that left a gateway."""

    records: list[tuple[str, bytes]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def leaks(self) -> list[str]:
        """Secrets in any of it, however they are spelled."""
        texts = {
            f"{topic} {number}": value.decode("latin-1") for number, (topic, value) in enumerate(self.records)
        }
        texts |= self.said | {"events": "\n".join(msgspec.json.encode(one).decode() for one in self.events)}
        return [f"{name}: {leak}" for name, text in texts.items() for leak in leaks(text)]

    def told_tokens(self, tokens: Iterable[str]) -> set[str]:
        """Tokens that anybody finds in the records who knows the engine's vocabulary but no key."""
        seen: set[int] = set()
        for topic, value in self.records:
            if topic == Topic.LOGITS.value:
                columns = decode_logits(value, CONTENT_TYPE).columns
                seen |= set(columns.tokens.tolist()) | set(columns.top_ids.tolist())
        return {token for token in tokens if seen & {IDS[token], token_hash(token.encode().hex())}}


CONTENT_TYPE = "application/vnd.klaxon.columns+msgpack"


def keys_with(pseudonyms: Pseudonyms) -> Keys:
    trust = Trust({ISSUER.key_id: TrustedKey(ISSUER.public_key, frozenset({Use.CONSENT}))})
    return Keys(
        PromptSigner(b"s" * 32, "s1"),
        pseudonyms,
        Sealing(TEXT_KEY, "t1", 4_000_000_000_000_000),
        Consents(lambda: trust),
        {"canary": f"Bearer {secret('mirror-credential')}", "control": None},
    )


@asynccontextmanager
async def watched(
    caplog: pytest.LogCaptureFixture, *, ids: bool, pseudonyms: Pseudonyms | None = None
) -> AsyncIterator[tuple[Running, list[Engine], Left]]:
    """A gateway between a baseline, a canary and a control; `Left` is filled at the end of the block."""
    engines = [Engine(f"{arm}-1", answering(ids=ids)) for arm in ("baseline", "canary", "control")]
    exporter, left = InMemorySpanExporter(), Left()
    spans = OtelSpans(SpanSettings(), SimpleSpanProcessor(exporter), rollout="r", gateway="g")
    keys = keys_with(pseudonyms or Pseudonyms(PSEUDONYM_KEY, "p1"))
    caplog.set_level(logging.DEBUG)
    async with running(engines, spans=spans, with_keys=keys) as gateway:
        yield gateway, engines, left
        await until(lambda: not sum(gateway.gateway.gauges()["gateway"][name] for name in UNDER_WAY))
        assert await gateway.publisher.drain(10)
        gauges = gateway.gateway.gauges()
    left.records = [(one.topic, one.value) for one in gateway.producer.sent]
    left.events = list(gateway.publisher.events)
    left.counts = {name: dict(counted) for name, counted in gauges.items()}
    left.said = {
        "log": "\n".join(
            Lines("gateway", as_json=False).format(one) for one in caplog.records if one.levelno >= LEVEL
        ),
        "spans": "\n".join(one.to_json() for one in exporter.get_finished_spans()),
        "metrics": exposition("gateway", Snapshot(gauges), 0).decode(),
        "keys": "\n".join(f"{one.key!r} {one.headers!r}" for one in gateway.producer.sent),
    }
    assert exporter.get_finished_spans()


LEVEL = logging.INFO
"""As `klaxon gateway` logs of its own; of other packages even less."""
UNDER_WAY = ("under_way", "mirrors_waiting", "mirrors_running")


async def ask(gateway: Running, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    try:
        async with gateway.client.post(f"{gateway.url}{path}", data=data, headers=sent) as answer:
            return await answer.read()
    except aiohttp.ClientError:
        return b""


async def everything(gateway: Running, engines: list[Engine], headers: dict[str, str]) -> None:
    """All requests, first of engines that are well, then of each that is not; and what is no request."""
    for path, body in bodies():
        assert CANARY.encode() in await ask(gateway, path, body, headers), (
            "the user gets what the engine says"
        )
    well = engines[0].answer
    for fault in FAULTS:
        for engine in engines:
            engine.answer = failing(fault)
        await ask(gateway, *bodies()[1], headers)
    for engine in engines:
        engine.answer = well
    for path, nothing in (
        (CHAT, secret("no-json").encode()),
        (CHAT, json.dumps({"model": "m", "messages": secret("messages")}).encode()),
        (f"/v1/models/{secret('path')}", b""),
        (f"/{secret('nowhere')}?q={secret('query')}", b""),
    ):
        await ask(gateway, path, nothing, headers)
    lone = b'{"model":"m","messages":[{"role":"user","content":"\\ud800'
    said = await ask(gateway, CHAT, lone + secret("lone").encode() + b'"}]}', headers)
    assert CANARY.encode() in said, "no signature can be made of it, and its user gets the answer"
    assert gateway.gateway.address is not None
    await send_broken(*gateway.gateway.address)


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "bytes"])
async def test_no_secret_leaves(caplog: pytest.LogCaptureFixture, ids: bool) -> None:
    assert len(FIFTY) == 50 == len(set(FIFTY))
    async with watched(caplog, ids=ids) as (gateway, engines, left):
        await everything(gateway, engines, HEADERS)
        seen = [request for engine in engines[1:] for request in engine.seen if request.method == "POST"]
    assert left.leaks() == []
    assert left.told_tokens(ANSWERS) == set()
    # It was not for want of anything that left.
    topics = {topic for topic, _ in left.records}
    assert topics == {Topic.REQUESTS.value, Topic.LOGITS.value}
    requests = [
        decode_requests(value, CONTENT_TYPE) for topic, value in left.records if topic == Topic.REQUESTS
    ]
    assert sum(one.columns.n for one in requests) >= 3 * (len(bodies()) + len(FAULTS)) - 3
    assert len({one.arm for one in left.events if isinstance(one, LogitEvent)}) == 3
    assert left.counts["gateway_texts"][Refusal.MALFORMED.value] > 0
    errors = {one.error for one in left.events if not isinstance(one, LogitEvent)}
    assert errors == {None, "refused", "overload", "engine", "garbled", "cut"}
    # Nor does a copy carry anything of the user's head.
    for request in seen:
        sent = {name.lower(): value for name, value in request.headers.items()}
        assert (
            leaks("\n".join(f"{name}: {value}" for name, value in sent.items() if name != "authorization"))
            == []
        )
        assert sent.get("authorization", "").removeprefix("Bearer ") in ("", secret("mirror-credential"))


async def test_tokens_are_told_with_the_key_and_not_without(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody consented. Equal prompts in twenty pairs have nothing in common; the key tells all of them."""
    async with watched(caplog, ids=True) as (gateway, _, left):
        for _ in range(20):
            await ask(gateway, *bodies()[1])
    found = [one for one in left.events if isinstance(one, LogitEvent)]
    pairs = {one.pair_id for one in found}
    assert len(pairs) == 20
    assert len({one.tokens for one in found}) == 20, "alike on all arms of a pair, in no two pairs"
    assert not set.intersection(*(set(one.tokens or ()) for one in found if one.arm == "baseline"))
    plain = list(IDS.values())
    for holder, told in ((Pseudonyms(PSEUDONYM_KEY, "p1"), True), (Pseudonyms(bytes(32), "p1"), False)):
        for one in found:
            assert one.pair_id is not None
            revealed = holder.of(one.pair_id).reveal(np.array(one.tokens, dtype=np.int64)).tolist()
            assert (revealed == plain) is told
            assert told or not set(revealed) & set(plain)


async def test_a_text_leaves_sealed_where_its_user_consented(caplog: pytest.LogCaptureFixture) -> None:
    path, body = bodies()[1]
    async with watched(caplog, ids=False) as (gateway, _, left):
        mine = {"X-Session-Id": "me", "X-Klaxon-Consent": consented("me")}
        await ask(gateway, path, body, mine)
        await ask(gateway, path, body, {**mine, "X-Session-Id": "somebody else"})
        await ask(gateway, path, body, {"X-Session-Id": "me"})
    assert left.leaks() == []
    events = [one for one in left.events if not isinstance(one, LogitEvent)]
    texts = [one for one in events if one.text is not None]
    assert {one.consent_id for one in events} == {None, "c-1"}
    assert len({one.pair_id for one in texts}) == 1, "neither by another's consent nor by none"
    for one in texts:
        belongs = Belongs("c-1", one.pair_id, one.signature)
        said = open_sealed(one.text, belongs, {"t1": TEXT_KEY})
        assert said.prompt == ("user", body["messages"][0]["content"])
        assert said.answer == "".join(ANSWERS)
    counted = left.counts["gateway_texts"]
    assert (counted["sealed"], counted["wrong_signature"], counted["absent"]) == (len(texts), 1, 1)


async def test_what_is_not_for_engines_reaches_none(caplog: pytest.LogCaptureFixture) -> None:
    ours = {"X-Session-Id": "s", "X-Klaxon-Consent": consented("s"), "X-Klaxon-Tenant": "t"}
    async with watched(caplog, ids=True) as (gateway, engines, _):
        await ask(gateway, *bodies()[1], ours)
        for path in (
            "/slots",
            "/v1/load_lora_adapter",
            "/sleep",
            "/v1/models/../../slots",
            "/metrics",
            "//v1/models",
        ):
            async with gateway.client.post(URL(gateway.url + path, encoded=True), json={}) as answer:
                assert answer.status in (404, 405), path
        seen = [request for engine in engines for request in engine.seen if request.method == "POST"]
    assert {request.path for request in seen} == {CHAT}
    assert len(seen) == 3
    for request in seen:
        assert not {name.lower() for name in ours} & {name.lower() for name in request.headers}


class _PlainPair(PairPseudonyms):
    """Tokens as they are."""

    __slots__ = ()

    def ids(self, ids: Any) -> Any:
        return np.asarray(ids, dtype=np.int32)

    def of_bytes(self, tokens: Any) -> list[str]:
        return [token.hex() if isinstance(token, bytes) else f"{token:08x}" for token in tokens]


class _Plain(Pseudonyms):
    __slots__ = ()

    def of(self, pair_id: str) -> PairPseudonyms:
        return _PlainPair(bytes(32))


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "bytes"])
async def test_known_bad_a_gateway_that_publishes_plain_tokens_is_caught(
    caplog: pytest.LogCaptureFixture, ids: bool
) -> None:
    async with watched(caplog, ids=ids, pseudonyms=_Plain(bytes(32), "p")) as (gateway, _, left):
        await ask(gateway, *bodies()[1])
    assert left.told_tokens(ANSWERS) == set(ANSWERS), "who knows the vocabulary reads the answer"
    assert bool(left.leaks()) is not ids, "bytes show themselves, ids need the vocabulary"


async def test_known_bad_a_prompt_in_a_line_is_withheld_or_caught(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An argument is withheld by its type; whoever writes it into the line itself is found here."""
    log = logging.getLogger("klaxon.gateway")
    async with watched(caplog, ids=True) as (gateway, _, left):
        await ask(gateway, *bodies()[1])
        log.info("asked %s", str(bodies()[1]))
    assert left.leaks() == []
    assert "asked [str withheld]" in left.said["log"]
    caplog.clear()
    async with watched(caplog, ids=True) as (gateway, _, left):
        await ask(gateway, *bodies()[1])
        log.info("asked " + str(bodies()[1]))  # noqa: G003
    assert any(leak.startswith("log: ") for leak in left.leaks())
