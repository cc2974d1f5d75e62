"""The demo's own installation: embedded broker, chDB in a folder, four workers and a router, as processes.

The configuration file it writes is an ordinary one: with `--keep` every other command can be pointed at it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.cli.demo.children import born
from pipeline.cli.demo.embedded_broker import KAFKA_SETTINGS, embedded_broker
from pipeline.cli.demo.errors import DemoError
from pipeline.cli.demo.fleet import ROLLOUT
from pipeline.cli.demo.ports import free_port
from pipeline.config import Config, load_config

GATEWAY_KEYS: Final = [
    argument for use in ("directives", "commands", "signature", "pseudonym") for argument in ("--for", use)
]
GATEWAY: Final = "demo-gateway"
"""Who reports what the gateway of live engines obeys."""
WORKERS: Final = ("measure", "pair", "gate", "archive")
COMMAND_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 20.0
INTERRUPTED_STOP_TIMEOUT_S: Final = 2.0
"""For somebody who waits at the terminal; a worker killed then resumes like any other at its next start."""
LOOK_S: Final = 1.0
KLAXON: Final = (sys.executable, "-c", "from pipeline.cli.main import main; main()")
"""The `klaxon` command of this interpreter, wherever its script is installed."""

CONFIGURATION: Final = """\
# Written by `klaxon demo`. A drill has to end within minutes: lateness is {lateness_s} s (default 15), the
# join timeout {join_timeout_s} s (default 60), and the policy's windows are short too (default 5 min).
# Not for a fleet.
kafka:
  bootstrap: {bootstrap}
  partitions: 2
{kafka}
clickhouse:
  dsn: chdb://{folder}/clickhouse
content:
{content}
gate:
{gate}
# /metrics, /healthz and /readyz of each process: on a free port, named in its log.
monitoring:
  measure_port: 0
  pair_port: 0
  gate_port: 0
  archive_port: 0
  router_port: 0
  gateway_port: 0
archive:
  block_age_ms: 500
  query_listen: {query_listen}
signatures:
  trust_file: {folder}/keys/trust.yaml
  directive_key_file: {folder}/keys/directives.key
  command_key_file: {folder}/keys/commands.key
{gateway}"""


class StageError(DemoError):
    """A part of the demo did not start or died; the message names it and shows what it said last."""


@dataclass(slots=True)
class Stage:
    """What is running."""

    folder: Path
    config_path: Path
    config: Config
    query_listen: str
    gateway: str = ""
    """The gateway's address; "": none runs."""
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    stop_timeout_s: float = STOP_TIMEOUT_S

    def check(self) -> None:
        """Raise StageError if a process has ended."""
        for name, process in self.processes.items():
            if process.returncode is not None:
                raise StageError(
                    f"{name} ended with code {process.returncode}; it said:\n{self.last_words(name)}"
                )

    async def until_interrupted(self) -> None:
        """Keep everything running until this task is cancelled, which ends the waiting alone.

        Raises StageError if a process ends meanwhile."""
        try:
            while True:
                self.check()
                await asyncio.sleep(LOOK_S)
        except asyncio.CancelledError:
            self.stop_timeout_s = INTERRUPTED_STOP_TIMEOUT_S
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()

    def last_words(self, name: str) -> str:
        """The end of a process's log."""
        try:
            text = (self.folder / "logs" / f"{name}.log").read_text(errors="replace")
        except OSError:
            return "(nothing)"
        return "\n".join(text.splitlines()[-15:])

    async def command(self, *arguments: str) -> str:
        """Run a klaxon command with the demo's configuration; returns its standard output.

        Raises StageError when it fails or takes too long."""
        process = await asyncio.create_subprocess_exec(
            *KLAXON,
            *arguments,
            "--config",
            str(self.config_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        born(process)
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                out, err = await process.communicate()
        except TimeoutError:
            said = f"klaxon {' '.join(arguments)}: no answer in {COMMAND_TIMEOUT_S:.0f} s"
            raise StageError(said) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            said = err.decode(errors="replace").strip()
            raise StageError(f"klaxon {' '.join(arguments)}: exit code {process.returncode}: {said}")
        return out.decode()

    async def start(self, name: str, *arguments: str, piped: bool = False) -> asyncio.subprocess.Process:
        """Start a long-running klaxon command; its log is `logs/NAME.log`, or standard output a pipe."""
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *KLAXON,
                *arguments,
                "--config",
                str(self.config_path),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=environment(),
                # Ctrl-C on the terminal reaches the demo alone, which stops everything in order.
                start_new_session=True,
                limit=1 << 20,
            )
        born(process)
        self.processes[name] = process
        return process


def environment() -> dict[str, str]:
    """Ours without any `KLAXON_*`: the demo's configuration is its file alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KLAXON_")}


@asynccontextmanager
async def stage(
    folder: Path, wanted: Config, say: Callable[[str], None], pools: Sequence[Mapping[str, Any]] = ()
) -> AsyncIterator[Stage]:
    """Everything up to and including the four workers, and a gateway before `pools` if there are any.

    Of `wanted` the sections content and gate count; addresses are the demo's own.

    Raises StageError, EmbeddedBrokerError."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with broker_in(folder) as bootstrap:
        made = _write_configuration(folder, bootstrap, wanted, pools)
        say(f"broker on {bootstrap} (Tansu, in memory, no transactions: one gate process)")
        topics, tables, _ = await asyncio.gather(
            made.command("topics", "create"),
            made.command("migrate"),
            made.command("keys", "create", "--if-absent", *(GATEWAY_KEYS if made.gateway else ())),
        )
        say(f"{len(topics.splitlines())} topics; {tables.strip().splitlines()[-1]} (ClickHouse in process)")
        try:
            for name in WORKERS:
                await made.start(name, "worker", name)
            if made.gateway:
                await made.start("gateway", "gateway")
            yield made
        except asyncio.CancelledError:
            made.stop_timeout_s = INTERRUPTED_STOP_TIMEOUT_S
            raise
        finally:
            await _stop(made)


@contextmanager
def broker_in(folder: Path) -> Iterator[str]:
    """The embedded broker with its log in the folder."""
    with embedded_broker(folder / "logs" / "broker.log") as bootstrap:
        yield bootstrap


def _write_configuration(
    folder: Path, bootstrap: str, wanted: Config, pools: Sequence[Mapping[str, Any]]
) -> Stage:
    query_listen = f"127.0.0.1:{free_port()}"
    port = free_port() if pools else None
    prefix = "KLAXON_KAFKA_"
    text = CONFIGURATION.format(
        bootstrap=bootstrap,
        kafka=_lines({k.removeprefix(prefix).lower(): v for k, v in KAFKA_SETTINGS.items()}),
        folder=folder.resolve(),
        content=_lines(msgspec.to_builtins(wanted.content)),
        gate=_lines(msgspec.to_builtins(wanted.gate)),
        lateness_s=wanted.content.lateness_s,
        join_timeout_s=wanted.content.join_timeout_s,
        query_listen=query_listen,
        gateway="" if port is None else _gateway_section(folder.resolve(), port, wanted, pools),
    )
    path = folder / "klaxon.yaml"
    path.write_text(text, encoding="utf-8")
    gateway = "" if port is None else f"http://127.0.0.1:{port}"
    return Stage(folder, path, load_config(str(path), {}), query_listen, gateway)


def _gateway_section(folder: Path, port: int, wanted: Config, pools: Sequence[Mapping[str, Any]]) -> str:
    """Every request is mirrored: there are few of them, and equal ones among them."""
    section = {
        "port": port,
        "rollout": ROLLOUT,
        "name": GATEWAY,
        "pools": pools,
        "mirror": {
            "rate": 1.0,
            "tokens_per_s": 10_000_000,
            "per_signature_per_minute": 1_000,
            "timeout_s": wanted.content.join_timeout_s,
        },
        "privacy": {
            "signature_key_file": f"{folder}/keys/signature.key",
            "pseudonym_key_file": f"{folder}/keys/pseudonym.key",
        },
    }
    # JSON is YAML.
    return f"gateway: {msgspec.json.encode(section).decode()}\n"


def _lines(section: Mapping[str, object]) -> str:
    return "\n".join(f"  {key}: {value}" for key, value in section.items())


async def _stop(made: Stage) -> None:
    """SIGTERM to all, then SIGKILL to whoever is left."""
    running = [process for process in made.processes.values() if process.returncode is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    waits = [asyncio.create_task(process.wait()) for process in running]
    if waits:
        await asyncio.wait(waits, timeout=made.stop_timeout_s)
    for process in running:
        if process.returncode is None:
            process.kill()
    await asyncio.gather(*waits)
