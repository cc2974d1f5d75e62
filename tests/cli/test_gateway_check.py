"""`klaxon gateway --check`: what it prints, its one JSON object, its exit codes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from agents.gateway.embedding import Embedder, HttpEmbedder, NoEmbedder
from agents.gateway.lacks import Code
from agents.gateway.settings import EmbeddingSettings, GatewaySettings, MirrorPaths, MirrorSettings
from pipeline.cli.doctor.engines import pool_findings
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.gateway_check import CODES, check_gateway
from pipeline.cli.main import cli
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.test_checking import AWAY, pool, settings
from tests.conftest import REPOSITORY

FUTURE_US = 4_000_000_000_000_000


async def checked(
    one: GatewaySettings,
    capsys: pytest.CaptureFixture[str],
    *,
    embedder: Embedder | None = None,
    until_us: int | None = FUTURE_US,
    as_json: bool = True,
) -> tuple[Exit, Any]:
    """In a thread of its own, as the command is: the engines of a test answer meanwhile."""
    code = await asyncio.to_thread(
        check_gateway,
        one,
        {},
        embedder or NoEmbedder(),
        tls=None,
        text_key_until_us=until_us,
        as_json=as_json,
    )
    said = capsys.readouterr().out
    return code, json.loads(said) if as_json else said


def found(said: Any) -> list[tuple[str, str]]:
    return [(one["severity"], one["code"]) for one in said["findings"]]


async def test_engines_that_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine("vllm").running() as first, FakeEngine("vllm").running() as second:
        arms = settings(pool(first.url), pool(second.url, arm="canary"))
        code, said = await checked(arms, capsys)
        assert code is Exit.OK
        assert found(said) == []
        assert said["ok"] is True
        assert [(one["arm"], one["node"], one["forced"]) for one in said["engines"]] == [
            ("baseline", "baseline-0", True),
            ("canary", "canary-0", True),
        ]
        (chat, completions) = said["engines"][0]["paths"]
        assert (chat["path"], chat["tokens_by"], chat["ok"]) == ("/v1/chat/completions", "ids", True)
        assert chat["ttft_us"] > 0
        assert completions["path"] == "/v1/completions"
        code, text = await checked(arms, capsys, as_json=False)
    assert code is Exit.OK
    lines = text.splitlines()
    heads = ["arm", "engine", "what it is", "path", "candidates", "tokens by", "forced"]
    assert re.split(r"\s\s+", lines[0].strip()) == heads
    assert lines[1].startswith("baseline  baseline-0  vllm 0.0-fake  /v1/chat/completions")
    assert lines[-1] == "every engine can be compared"


async def test_an_engine_that_is_away_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine("vllm").running() as server:
        code, said = await checked(settings(pool(server.url), pool(AWAY, arm="canary")), capsys)
    assert code is Exit.UNREACHABLE
    assert found(said) == [("error", "engine_unreachable")]
    (one,) = said["findings"]
    assert one["where"] == "canary, engine canary-0"
    assert one["remedy"] == "start it, or correct its url"


async def test_an_engine_that_cannot_be_compared_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine("vllm").running() as first, FakeEngine("tgi").running() as second:
        code, said = await checked(settings(pool(first.url), pool(second.url, "tgi", "canary")), capsys)
    assert code is Exit.BAD
    assert ("error", "engine_logprobs") in found(said)
    assert ("error", "engines_differ") in found(said)
    (differ,) = [one for one in said["findings"] if one["code"] == "engines_differ"]
    assert differ["what"].startswith("definition of log-probabilities: raw (baseline-0) against processed")


async def test_warnings_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine("llama.cpp").running() as server:
        one = settings(pool(server.url, "llama.cpp"), forced=True)
        code, said = await checked(one, capsys)
        assert code is Exit.OK
        assert found(said) == [("warning", "engine_free_running"), ("note", "no_canary")]
        assert said["engines"][0]["forced"] is False
        code, text = await checked(one, capsys, as_json=False)
    assert "warning: baseline, engine baseline-0: free-running only: llama.cpp scores no given answer" in text
    assert text.endswith("0 errors, 2 other findings\n")


async def test_a_gateway_that_mirrors_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine("vllm").running() as server:
        arms = (pool(server.url), pool(server.url + "/", arm="canary"))
        none = MirrorPaths(chat=False, completions=False)
        for mirror in (MirrorSettings(rate=0), MirrorSettings(paths=none)):
            one = GatewaySettings(rollout="r", pools=arms, mirror=mirror)
            code, said = await checked(one, capsys)
            assert (code, found(said)) == (Exit.OK, [("warning", "nothing_mirrored")])


@pytest.mark.parametrize(("until_us", "bad"), [(None, False), (FUTURE_US, False), (1, True)])
async def test_a_key_that_is_past_its_time(
    until_us: int | None, bad: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeEngine("vllm").running() as server:
        code, said = await checked(settings(pool(server.url)), capsys, until_us=until_us)
    assert (("error", "text_key_too_old") in found(said)) is bad
    assert code is (Exit.BAD if bad else Exit.OK)


async def test_the_endpoint_of_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    from aiohttp import web

    from tests.agents.gateway.answering import answering

    async def embed(request: web.Request) -> web.Response:
        assert (await request.json())["input"] == "Water is wet."
        return web.json_response({"data": [{"embedding": [0.5] * 384}]})

    async with FakeEngine("vllm").running() as server, answering(embed) as (_, url, _):
        for address, dimensions in ((url, 384), (AWAY, None)):
            where = EmbeddingSettings(url=address, model="bge", timeout_s=60)
            one = GatewaySettings(rollout="r", pools=(pool(server.url),), embeddings=where)
            code, said = await checked(one, capsys, embedder=HttpEmbedder(where))
            assert said["embedding_dimensions"] == dimensions
            assert (("error", "embeddings") in found(said)) is (dimensions is None)
            assert code is (Exit.OK if dimensions else Exit.BAD)


def configuration(folder: Path, **more: Any) -> Path:
    """A whole one, with keys as `klaxon keys create` makes them."""
    made = CliRunner().invoke(cli, ["keys", "create", str(folder / "keys"), "--for", "gateway"])
    assert made.exit_code == 0, made.output
    made_keys = folder / "keys"
    privacy = {f"{kind}_key_file": str(made_keys / f"{kind}.key") for kind in ("signature", "pseudonym")}
    section = {
        "rollout": "fp8",
        "pools": [
            {
                "arm": "baseline",
                "kind": "vllm",
                "model_version": "v1",
                "engines": [{"node": "baseline-0", "url": AWAY}],
            }
        ],
        "privacy": privacy,
    }
    path = folder / "klaxon.yaml"
    path.write_text(json.dumps({"gateway": section | more, "signatures": {"required": False}}))
    return path


def test_by_the_command(tmp_path: Path) -> None:
    """The keys are read, no Kafka is asked, and nothing listens."""
    path = configuration(tmp_path)
    ended = CliRunner().invoke(
        cli, ["gateway", "--config", str(path), "--check", "--json"], standalone_mode=False
    )
    assert ended.return_value is Exit.UNREACHABLE
    said = json.loads(ended.stdout)
    assert found(said) == [("error", "engine_unreachable"), ("note", "no_canary")]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"privacy": {}}, "gateway.privacy.signature_key_file"),
        ({"pools": []}, "gateway.pools"),
        ({"embeddings": {"url": AWAY, "model": "m", "authorization_file": "/absent"}}, "authorization_file"),
    ],
)
def test_a_configuration_that_cannot_be_is_exit_2(tmp_path: Path, more: Any, told: str) -> None:
    path = configuration(tmp_path, **more)
    ended = CliRunner().invoke(cli, ["gateway", "--config", str(path), "--check"])
    assert isinstance(ended.exception, CommandError)
    assert ended.exception.exit_code is Exit.USAGE
    assert told in str(ended.exception)


def test_every_problem_has_a_code_of_its_own() -> None:
    assert set(CODES) == set(get_args(Code))
    assert len(set(CODES.values())) == len(CODES)
    explained = set(re.findall(r"`([a-z_]+)`", (REPOSITORY / "docs" / "operate.md").read_text()))
    assert {*CODES.values(), "engines_differ"} <= explained


async def test_the_doctor_asks_a_gateways_engines_too(tmp_path: Path) -> None:
    assert list(pool_findings(GatewaySettings())) == []
    async with FakeEngine("vllm").running() as server:
        arms = settings(pool(server.url), pool(AWAY, arm="canary"))
        (away,) = await asyncio.to_thread(lambda: list(pool_findings(arms)))
    assert (away.severity, away.code) == ("error", "engine_unreachable")
    assert away.where == "canary, engine canary-0"
    unread = settings(pool(AWAY, mirror_authorization_file=str(tmp_path / "absent")))
    (note,) = pool_findings(unread)
    assert (note.severity, note.code) == ("note", "not_checked")
    assert "absent" in note.what
