"""docs/operate.md: every command line in it is run, in its order, on a real installation."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from pathlib import Path
from typing import get_args

import click
import pytest
from aiohttp import web
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.cli.status import read_sources
from pipeline.config import load_config
from pipeline.core.gate.answer import Code
from tests.conftest import REPOSITORY
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.waiting import eventually
from tests.workers.fleet import QUICK, fleet

PAGE = (REPOSITORY / "docs" / "operate.md").read_text(encoding="utf-8")
SECRET = "whsec_a2tra2tra2tra2tra2tra2tra2tra2tr"
FOR_EVER = ("klaxon notify",)


def lines() -> list[str]:
    """What stands in blocks that name no language, in order. Blocks of another language are not ours."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    ours = [block for language, block in fenced if not language]
    return [line for block in ours for line in block.splitlines() if line.startswith("klaxon ")]


def test_no_line_is_left_out() -> None:
    anywhere = [line for line in PAGE.splitlines() if line.startswith("klaxon ")]
    assert lines() == anywhere


def inline() -> list[str]:
    return re.findall(r"`(klaxon [^`…]+)`", PAGE)


@pytest.mark.parametrize("command", sorted({*lines(), *inline()}))
def test_every_command_line_parses(command: str) -> None:
    words = shlex.split(command)[1:]
    group: click.Command = cli
    context = click.Context(cli)
    while isinstance(group, click.Group) and words:
        found = group.get_command(context, words[0])
        assert found is not None, f"no command {words[0]!r} in {command!r}"
        group, words = found, words[1:]
    if not isinstance(group, click.Group) and command in lines():  # elsewhere only the name is meant
        with group.make_context(group.name, words):
            pass


def test_every_reason_and_every_finding_is_explained() -> None:
    sources = [*(REPOSITORY / "pipeline" / "cli" / "doctor").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    findings = set(re.findall(r'code="([a-z_]+)"', text))
    findings |= {"other_settings", "source_silent", "not_checked"}
    explained = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert findings - explained == set()
    assert set(get_args(Code)) - {"retired", "final"} - explained == set()


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
# A command's loop ends with it here, its process would: aiokafka leaves a connection to that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_every_command_line_does_what_it_says(
    kafka: Broker, log_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docs", "pipeline"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    app = web.Application()
    app.router.add_post("/hook", _taken)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    environment = {
        **kafka.environment,
        **QUICK,
        "KLAXON_CLICKHOUSE_DSN": f"chdb://{tmp_path}/archive",
        "KLAXON_NOTIFY_URL": f"http://127.0.0.1:{runner.addresses[0][1]}/hook",
        "KLAXON_NOTIFY_SECRET": SECRET,
    }
    (tmp_path / "klaxon.yaml").write_text("worker: {gauges_every_s: 60}\n")
    for name in [name for name in os.environ if name.startswith("KLAXON_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    config = load_config(None, environment)

    async def all_close_their_seconds() -> bool:
        """The page's processes run for a while before the doctor is asked; here they are warm at least."""
        return not any(one.problem for one in await read_sources(config))

    try:
        async with fleet(kafka, log_folder) as (_, gate):
            await gate.until_log("taken")
            await eventually(all_close_their_seconds)
            for line in lines():
                if line in FOR_EVER:
                    command = (*KLAXON, *shlex.split(line)[1:])
                    async with Worker(
                        "notify", kafka, log_folder, environment=environment, command=command
                    ) as one:
                        await one.until_log("ready: gap, trip")
                        assert await one.stop() == 0, one.log
                    continue
                arguments = shlex.split(line)[1:]
                done = await asyncio.to_thread(CliRunner().invoke, cli, arguments, standalone_mode=False)
                assert (done.exception, done.return_value or 0) == (None, 0), f"{line}: {done.output}"
    finally:
        await runner.cleanup()


async def _taken(_: web.Request) -> web.Response:
    return web.Response()
