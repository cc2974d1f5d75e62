"""The `klaxon gateway` process without any broker: how it begins, what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pipeline.workers.watchdog import EXIT_CODE
from tests.agents.gateway.fake_asked import MODEL
from tests.agents.gateway.fake_engine import FakeEngine
from tests.conftest import REPOSITORY
from tests.kafka.processes import KLAXON
from tests.system.gateway import Pool, section

pytestmark = pytest.mark.slow

WITHIN_S = 60.0
NO_BROKER = {"kafka": {"bootstrap": "127.0.0.1:9"}, "signatures": {"required": False}}
PROMPT = "a secret of the user's"
CREDENTIAL = "Bearer credential-of-copies"


@dataclass
class Process:
    """One `klaxon gateway`."""

    process: asyncio.subprocess.Process
    log: Path
    url: str = ""
    """Once it listens."""

    def said(self) -> list[str]:
        """Lines so far."""
        return self.log.read_text().splitlines()

    async def until_said(self, text: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while text not in self.log.read_text():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)

    async def listens(self) -> None:
        """Its address stands in `url` then: the system chose it, so nobody else can have had it before."""
        await self.until_said("obeys roll-out")
        found = re.search(r"listening on (http://\S+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        self.url = found[1]

    async def until_refusing(self, client: aiohttp.ClientSession) -> None:
        """No connection comes about: what it says of it, it says just before."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    async with client.get(self.url + "/v1/models") as answer:
                        await answer.read()
                except aiohttp.ClientConnectorError:
                    return
                except aiohttp.ClientError:
                    pass  # taken before, and hung up on
                await asyncio.sleep(0.02)

    async def ended(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(WITHIN_S):
            return await self.process.wait()


def configuration(folder: Path, engine: str, port: int = 0, more: Mapping[str, Any] | None = None) -> Path:
    credential = folder / "credential"
    credential.write_text(CREDENTIAL)
    credential.chmod(0o600)
    pools = [Pool("baseline", [engine], "vllm")]
    gateway = section("chat", pools, port, folder, more or {})
    gateway["pools"][0]["mirror_authorization_file"] = str(credential)
    path = folder / "klaxon.yaml"
    path.write_text(json.dumps({**NO_BROKER, "gateway": gateway}))  # JSON is YAML
    return path


@asynccontextmanager
async def started(path: Path) -> AsyncIterator[Process]:
    log = path.with_suffix(".log")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KLAXON_")}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *KLAXON, "gateway", "--config", str(path), cwd=REPOSITORY, stdout=out, stderr=out,
            env={**environment, "KLAXON_MONITORING_GATEWAY_PORT": "0"},
        )  # fmt: skip
    try:
        yield Process(process, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def streaming(it: Process, client: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientResponse]:
    """An answer that has begun, of which nothing has been read."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    url = it.url + "/v1/chat/completions"
    async with client.post(url, json={**asked, "max_tokens": 6}) as answer:
        assert answer.status == 200
        yield answer


async def test_without_a_broker_users_are_served_and_a_stream_ends_whole_after_sigterm(
    tmp_path: Path,
) -> None:
    engine = FakeEngine("vllm")
    async with (
        engine.running() as server,
        aiohttp.ClientSession() as client,
        started(configuration(tmp_path, server.url)) as it,
    ):
        await it.listens()
        async with streaming(it, client) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await it.until_said("not publishing yet")
        engine.fault = "pause"
        async with streaming(it, client) as answer:
            it.process.send_signal(signal.SIGTERM)
            await it.until_said("no more requests are taken; 1 under way may end")
            await it.until_refusing(client)
            engine.released.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await it.ended() == 0
    said = "\n".join(it.said())
    for told in (
        "INFO klaxon.gateway: listening on http://127.0.0.1:",
        "obeys roll-out chat, as gateway-of-chat",
        "baseline: m1 on 1 engine of kind vllm",
        "mirrors 1 of requests, 10000000 tokens a second at most, free-running",
        "keys are to be replaced: signature by 20",
        "without a key for texts none leaves",
    ):
        assert said.count(told) == 1, told
    assert said.count("not publishing yet") == 1, said  # said once, however long it lasts
    assert "Traceback" not in said
    for secret in (PROMPT, CREDENTIAL, "credential-of-copies"):
        assert secret not in said


async def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        FakeEngine("vllm", fault="hang").running() as engine,
        aiohttp.ClientSession() as client,
        started(configuration(tmp_path, engine.url)) as it,
    ):
        await it.listens()
        async with streaming(it, client):
            it.process.send_signal(signal.SIGTERM)
            await it.until_said("no more requests are taken")
            assert it.process.returncode is None
            it.process.send_signal(signal.SIGTERM)
            assert await it.ended() == EXIT_CODE
    assert it.said()[-1] == "klaxon: second SIGTERM; ending the process"


async def refused(path: Path) -> str:
    """The one line of a gateway that does not begin."""
    async with started(path) as it:
        assert await it.ended() == 2
        lines = [line for line in it.said() if line.startswith("klaxon: ")]
        assert "Traceback" not in it.log.read_text()
        (line,) = lines
        return line


async def test_a_port_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = await refused(configuration(tmp_path, "http://127.0.0.1:9", port))
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "set gateway.listen and gateway.port" in line


async def test_a_mistake_in_the_configuration_is_named(tmp_path: Path) -> None:
    line = await refused(configuration(tmp_path, "http://127.0.0.1:9", more={"prot": 8080}))
    assert "klaxon.yaml" in line
    assert "prot" in line
    assert "port" in line
