"""The same fifty secrets through `klaxon gateway` as it runs: its log, its metrics, Kafka, a collector."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner
from yarl import URL

from pipeline.cli.main import cli
from pipeline.secret_key_file import KeyKind
from schemas.codec import decode_logits, decode_requests
from schemas.control import Directive
from schemas.topics import COLUMNS, Topic
from tests.agents.gateway.harness import CHAT, Engine
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
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, KLAXON, Worker
from tests.kafka.records import dump, producer
from tests.kafka.waiting import eventually
from tests.monitoring.scraping import address_of, scrape
from tests.monitoring.test_secrets import leaks, secret

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def configured(folder: Path, engines: list[Engine], collector: str) -> Path:
    """The gateway's configuration, with keys made by `klaxon keys`."""
    made = CliRunner().invoke(cli, ["keys", "create", str(folder), "--for", "gateway", "--for", "consent"])
    assert made.exit_code == 0, made.output
    credential = folder / "mirror"
    credential.write_text(f"Bearer {secret('mirror-credential')}\n")
    credential.chmod(0o600)
    section: dict[str, Any] = {
        "rollout": "r", "port": 0, "fallback": "v-baseline",
        "pools": [
            {
                "arm": engine.node, "kind": "vllm", "model_version": f"v-{engine.node}",
                "engines": [{"node": f"{engine.node}-1", "url": engine.url}],
                "mirror_authorization_file": str(credential),
            }
            for engine in engines
        ],
        "mirror": {"rate": 1.0, "tokens_per_s": 10_000_000, "per_signature_per_minute": 1000},
        "privacy": {
            **{f"{kind.value}_key_file": str(folder / f"{kind.value}.key") for kind in KeyKind},
            "consent_trust_file": str(folder / "trust.yaml"),
        },
        "spans": {"endpoint": collector},
    }  # fmt: skip
    path = folder / "klaxon.yaml"
    path.write_text(json.dumps({"gateway": section, "monitoring": {"gateway_port": 0}}))
    return path


def directive() -> Directive:
    """Everybody to the baseline; the others get copies."""
    now_us = time.time_ns() // 1000
    weights = {"v-baseline": 100.0, "v-canary": 0.0}
    return Directive(
        v=1, rollout="r", generation=1, epoch=1, ts_us=now_us, lease_until_us=now_us + 100_000_000,
        dead_man_us=600_000_000, state="observing", weights=weights, last_promoted={"v-baseline": 100.0},
        fallback="v-baseline", level=0, policy_hash="0",
    )  # fmt: skip


@asynccontextmanager
async def collecting(spans: list[bytes]) -> AsyncIterator[str]:
    """A collector: its address for OTLP over HTTP."""

    async def taken(request: web.Request) -> web.Response:
        spans.append(await request.read())
        return web.Response()

    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/traces", taken)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}/v1/traces".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def spill(url: str, engines: list[Engine]) -> None:
    """All requests of well engines, then one of each that is not."""
    async with aiohttp.ClientSession() as client:

        async def ask(path: str, body: Any) -> bytes:
            try:
                async with client.post(url + path, json=body, headers=HEADERS) as answer:
                    return await answer.read()
            except aiohttp.ClientError:
                return b""

        for path, body in bodies():
            assert ANSWERS[0].encode() in await ask(path, body), "its user gets the answer"
        well = engines[0].answer
        for fault in FAULTS:
            for engine in engines:
                engine.answer = failing(fault)
            await ask(*bodies()[1])
        for engine in engines:
            engine.answer = well
        for number in range(3):
            await ask(CHAT, {**bodies()[1][1], "seed": number})
        await ask(f"/{secret('nowhere')}", {})


async def test_no_secret_leaves_the_process(kafka: Broker, log_folder: Path, tmp_path: Path) -> None:
    assert len(set(FIFTY)) == 50
    engines = [Engine(arm, answering(ids=True)) for arm in ("baseline", "canary", "control")]
    spans: list[bytes] = []
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        collector = await stack.enter_async_context(collecting(spans))
        configuration = configured(tmp_path / "etc", engines, collector)
        gateway = await stack.enter_async_context(
            Worker(
                "gateway",
                kafka,
                log_folder,
                environment={**GAUGES_EVERY_SECOND, "KLAXON_LOGGING_FORMAT": "json"},
                command=(*KLAXON, "gateway", "--config", str(configuration)),
            )
        )
        monitoring = await address_of(gateway)
        await gateway.until_log("listening on http://")
        async with producer(kafka) as client:
            value = msgspec.json.encode(directive())
            headers = [keys.directive_header(b"r", value)]
            await client.send_and_wait(Topic.CONTROL.value, value, b"r", headers=headers)
        await gateway.until_log("observing")
        url = "http://" + gateway.log.rpartition("listening on http://")[2].split('"')[0].split()[0]
        await spill(url, engines)
        address = URL(url)
        await send_broken(str(address.host), int(address.port or 0))

        async def published() -> bool:
            logits = [one for one in await dump(kafka, Topic.LOGITS) if one.value]
            return sum(decode_logits(one.value, COLUMNS).columns.n for one in logits) >= 15

        await eventually(published)
        metrics = await scrape(monitoring)
        assert await gateway.stop() == 0
        records = {topic: await dump(kafka, topic) for topic in Topic}
    for topic, found in records.items():
        for record in found:
            text = f"{record.key!r} {record.headers!r} {(record.value or b'').decode('latin-1')}"
            assert leaks(text) == [], topic
    assert leaks(gateway.log) == []
    assert leaks(metrics) == []
    assert spans
    assert leaks(b"\n".join(spans).decode("latin-1")) == []
    columns = [decode_logits(one.value, COLUMNS).columns for one in records[Topic.LOGITS]]
    seen = {token for one in columns for token in [*one.tokens.tolist(), *one.top_ids.tolist()]}
    assert not seen & set(IDS.values()), "pseudonyms"
    assert sum(decode_requests(one.value, COLUMNS).columns.n for one in records[Topic.REQUESTS]) >= 30
    assert {int(arm) for one in columns for arm in one.arm} == {0, 1, 2}
