"""Made parts of docs/gateway.md: `python -m tests.docs.gateway --write` renews the table and the example."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from typing import Any, Final

from agents.gateway.embedding import NoEmbedder
from agents.gateway.settings import EngineSettings, GatewaySettings, PoolSettings
from pipeline.cli.gateway_check import check_gateway
from pipeline.monitoring.metrics import CLOSED, METRICS, Thing
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.test_facts import VLLM
from tests.agents.gateway.wire import Asked, Reply
from tests.conftest import REPOSITORY

PAGE: Final = REPOSITORY / "docs" / "gateway.md"
COMMAND: Final = "$ klaxon gateway --config klaxon.yaml --check"
NOTE: Final = "made by `python -m tests.docs.gateway --write`"


class Vllm(FakeEngine):
    """A vLLM in development mode: it says all of itself."""

    def __init__(self, mode: str = "raw_logprobs") -> None:
        super().__init__("vllm")
        self.said: dict[str, Any] = json.loads(json.dumps(VLLM))
        del self.said["/v1/models"]  # its own stands
        self.said["/server_info?config_format=json"]["vllm_config"]["model_config"]["logprobs_mode"] = mode

    async def answer(self, asked: Asked, reply: Reply) -> None:
        said = self.said.get(asked.path)
        if said is None:
            await super().answer(asked, reply)
            return
        body = json.dumps(said).encode()
        reply.head(200, [("content-type", "application/json")], length=len(body))
        reply.write(body)
        reply.end()


def _pool(arm: Any, version: str, *urls: str) -> PoolSettings:
    first = {"baseline": 1, "canary": 3}[arm]
    engines = tuple(EngineSettings(node=f"gpu-{first + at}", url=url) for at, url in enumerate(urls))
    return PoolSettings(arm=arm, kind="vllm", model_version=version, engines=engines)


async def check_example() -> str:
    """What `--check` prints of a baseline as it should be, and a canary of another mode, one engine away."""
    out = io.StringIO()
    async with (
        Vllm().running() as one,
        Vllm().running() as two,
        Vllm("processed_logprobs").running() as three,
    ):
        baseline = _pool("baseline", "v1", one.url, two.url)
        canary = _pool("canary", "v2", three.url, "http://127.0.0.1:1")
        settings = GatewaySettings(rollout="chat-fp8", pools=(baseline, canary))

        def check() -> None:
            with contextlib.redirect_stdout(out):
                check_gateway(settings, {}, NoEmbedder(), tls=None, text_key_until_us=None, as_json=False)

        await asyncio.to_thread(check)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(["```", COMMAND, *lines, "```"]) + "\n"


def metrics_table() -> str:
    """Every metric of the gateway's own."""
    rows = ["| metric | labels | meaning |", "|---|---|---|"]
    for metric in METRICS:
        if metric.processes != ("gateway",):
            continue
        told = [f"`{label}`" for label in metric.labels]
        if metric.thing in CLOSED and metric.thing is not Thing.GATEWAY:
            told[-1] += ": " + ", ".join(f"`{value}`" for value in CLOSED[metric.thing])
        rows.append(f"| `{metric.name}` ({metric.kind}) | {'; '.join(told) or '–'} | {metric.meaning} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page as it has to be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in (("check", asyncio.run(check_example())), ("metrics", metrics_table())):
        begin, end = f"<!-- {name}: {NOTE} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        assert found, begin
        text = before + begin + "\n" + made + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
