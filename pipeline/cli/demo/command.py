"""`klaxon demo`: the whole pipeline on this machine, one drill, answers of a real model."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click
import msgspec

from pipeline.cli import options
from pipeline.cli.demo.children import kill_all
from pipeline.cli.demo.recording import SHIPPED, read_recording
from pipeline.cli.demo.report import Fault, Result, show
from pipeline.cli.demo.run import Plan, Recorded, run
from pipeline.cli.demo.stage import StageError
from pipeline.cli.demo.story import Story
from pipeline.cli.demo.traffic import drawn_arrivals, read_figures, trace_arrivals
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import json_option
from pipeline.cli.printing import printed
from pipeline.config import Config, ContentConfig, load_config
from pipeline.errors import PipelineError
from pipeline.policy_file import read_policy_file

EXAMPLE = """\b
Example: klaxon demo
         klaxon demo --fault none
         klaxon demo --trace AzureLLMInferenceTrace_code.csv --speed 40 --keep /tmp/drill"""

DEFAULT_REQUESTS: Final = 5200
DEFAULT_LIVE_REQUESTS: Final = 120
DEFAULT_SPEED: Final = 8.0
QUESTION: Final = "SELECT now_us, kind, rule, reason FROM v_decisions ORDER BY now_us"
ASKED: Final = '{"messages": [{"role": "user", "content": "What is a canary?"}], "max_tokens": 16}'
"""Of the gateway of live engines."""
POLICIES: Final = Path(__file__).parent
FILE: Final = click.Path(path_type=Path)


ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED: Final = 130


@click.command(epilog=EXAMPLE)
@click.option("--requests", type=click.IntRange(min=1), help="How many. [default: 5200; live engines: 120]")
@click.option(
    "--speed",
    type=float,
    callback=options.speed,
    help="[default: 8] Arrivals come so many times faster than measured; durations stay as recorded.",
)
@click.option(
    "--fault",
    type=click.Choice(["long_context", "none"]),
    default="long_context",
    show_default=True,
    help="Part-way one canary node damages prompts over 2,048 tokens; or nothing goes wrong.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of arrivals and routing.")
@click.option("--trace", type=FILE, help="Arrivals and lengths from a file: Azure CSV or Mooncake JSONL.")
@click.option("--recording", type=FILE, help="Another recording of answers, of the same shape.")
@click.option(
    "--engines",
    type=click.Choice(["llama.cpp"]),
    help="Real engines answer live, in place of the recording (`make engines` installs them).",
)
@click.option("--keep", type=FILE, help="Keep configuration, logs and archive in this (new) folder.")
@click.option(
    "--stay",
    is_flag=True,
    help="After the drill everything runs on until Ctrl-C, for other commands to look at.",
)
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help="Sections content and gate, and policy.file, in place of the demo's own; addresses are its own.",
)
@json_option
def demo(
    requests: int | None,
    speed: float | None,
    fault: Fault,
    seed: int,
    trace: Path | None,
    recording: Path | None,
    engines: str | None,
    keep: Path | None,
    stay: bool,
    config_path: str | None,
    as_json: bool,
) -> int:
    """Run the whole pipeline on this machine: one drill, about two minutes, nothing else needed.

    Broker and ClickHouse are embedded; the configuration is the demo's own, with short windows (lateness 1 s,
    join timeout 3 s). Recorded answers of a real model are replayed through a small fleet. Exit code 0 only
    when the outcome is the expected one.
    """
    try:
        traffic = None
        if engines is None:
            traffic = Recorded(
                read_recording(recording or SHIPPED, fault=fault != "none"),
                drawn_arrivals(read_figures(), seed) if trace is None else trace_arrivals(trace),
                speed or DEFAULT_SPEED,
            )
        elif trace is not None or recording is not None or speed is not None:
            raise click.UsageError(
                "live engines answer as fast as they can: --engines takes no --trace, --recording or --speed"
            )
        count = requests or (DEFAULT_REQUESTS if traffic is not None else DEFAULT_LIVE_REQUESTS)
        config, policy = _settings(config_path, live=traffic is None)
        plan = Plan(
            traffic, count, fault, seed, policy, config, stay=stay, folder_stays=stay or keep is not None
        )
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None

    def tell(result: Result) -> None:
        if as_json:
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
            sys.stdout.flush()
        else:
            printed(lambda console: show(result, console))
        if plan.folder_stays:
            for line in _hints(folder / "klaxon.yaml", stay=stay, keep=keep is not None):
                click.echo(line, err=as_json)

    folder = _new_folder() if keep is None else _kept_folder(keep)
    failed = False
    try:
        result = asyncio.run(_until_told(plan, folder, Story(as_json=as_json), tell))
        failed = not result.as_expected
    except PipelineError as error:
        failed = True
        code = Exit.UNREACHABLE if isinstance(error, StageError) else Exit.USAGE
        raise CommandError(str(error), code) from None
    finally:
        if failed:
            click.echo(f"logs and configuration are kept in {folder}", err=True)
        elif keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return Exit.BAD if failed else Exit.OK


async def _until_told(plan: Plan, folder: Path, story: Story, tell: Callable[[Result], None]) -> Result:
    """Run; the first signal that asks for an end stops all that was started, in order; a second kills it."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def end_now(*_: object) -> None:
        kill_all()
        os.write(2, b"klaxon: interrupted\n")
        os._exit(INTERRUPTED)

    def end() -> None:
        for number in ENDING:
            loop.remove_signal_handler(number)
            signal.signal(number, end_now)  # not left to the loop, which may be what hangs
        task.cancel()

    for number in ENDING:
        loop.add_signal_handler(number, end)
    try:
        return await run(plan, folder, story, tell)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _hints(config: Path, *, stay: bool, keep: bool) -> Iterator[str]:
    """What else can be asked, as lines to copy."""
    klaxon = _command()
    if stay:
        yield ""
        yield "everything runs on until Ctrl-C" + (":" if keep else f"; then {config.parent} is removed:")
        yield f"  {klaxon} status --config {config}"
        yield f"  {klaxon} watch --config {config}"
        if (gateway := load_config(str(config), {}).gateway).pools:
            yield f"  curl http://{gateway.listen}:{gateway.port}/v1/chat/completions -d '{ASKED}'"
    else:
        yield "ask more:"
    yield f"  {klaxon} sql --config {config} '{QUESTION}'"


def _command() -> str:
    """How this command was called, where its short name would not be found."""
    called = sys.argv[0]
    return called if Path(called).name == "klaxon" and shutil.which("klaxon") is None else "klaxon"


def _settings(config_path: str | None, *, live: bool) -> tuple[Config, str]:
    """The given configuration, else the demo's own, and the text of its policy."""
    # Live engines that share two cores finish their halves of a pair further apart.
    content = ContentConfig(lateness_s=1, join_timeout_s=10 if live else 3)
    own = POLICIES / ("policy_live.yaml" if live else "policy.yaml")
    if config_path is None:
        return Config(content=content), own.read_text(encoding="utf-8")
    config = load_config(config_path, {})
    if config.policy.file is not None:
        return config, read_policy_file(config.policy.file).text
    return config, own.read_text(encoding="utf-8")


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="klaxon-demo-"))


def _kept_folder(keep: Path) -> Path:
    """The folder to keep, which must be new or empty."""
    try:
        keep.mkdir(parents=True, exist_ok=True)
        used = any(keep.iterdir())
    except OSError as error:
        raise CommandError(f"--keep {keep}: {error.strerror}; name another folder", Exit.USAGE) from None
    if used:
        raise CommandError(f"--keep {keep}: not empty; name a new folder", Exit.USAGE)
    return keep
