"""Every service's exact command line, started against a real broker, with the compose file's variables."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.infra.test_compose import ours
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import delete_topics

WORKERS = ("measure", "pair", "gate", "archive")
SPEC = """\
rollout: composed
arms:
  baseline: {model_version: m1, nodes: ["base-*"]}
  canary: {model_version: m2, nodes: ["canary-*"]}
fallback: m1
"""


class Composed:
    """The services of the compose file, with its addresses replaced by those of this test."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self._broker = broker
        self._folder = folder
        self._here = {
            "KLAXON_CONFIG": str(REPOSITORY / "infra" / "klaxon.yaml"),
            "KLAXON_KAFKA_BOOTSTRAP": broker.bootstrap,
            "KLAXON_CLICKHOUSE_DSN": f"chdb://{folder}/clickhouse",
            "KLAXON_CLICKHOUSE_PASSWORD": "",
            **{name: self._place(path) for name, path in keys.settings().items()},
        }

    def _place(self, path: str) -> str:
        """Where the compose file's volumes are here."""
        kind = "trust" if path.endswith(".yaml") else "keys"
        return str(self._folder / kind / Path(path).name)

    def environment(self, service: str) -> dict[str, str]:
        """The variables of a service. One that is an address in another network must be replaced here."""
        theirs = {name: str(value) for name, value in ours()[service]["environment"].items()}
        merged = {**theirs, **{name: value for name, value in self._here.items() if name in theirs}}
        assert not [value for value in merged.values() if "kafka:" in value or "clickhouse:" in value]
        return merged

    def process(self, service: str, *command: str) -> Worker:
        """The service's command line, or `command` with its environment."""
        arguments = command or tuple(ours()[service]["command"])
        # The broker's own variables would hide what the compose file says: only what it says is given.
        bare = Broker(self._broker.config)
        return Worker(
            service, bare, self._folder, environment=self.environment(service), command=(*KLAXON, *arguments)
        )

    async def done(self, service: str, *command: str) -> str:
        """Run to the end, which must be a good one."""
        async with self.process(service, *command) as process:
            assert await process.until_ended(timeout_s=120) == 0, process.log
            return process.log


@pytest.mark.slow
@pytest.mark.kafka
async def test_the_composed_services_start_and_a_directive_reaches_the_router(
    kafka_session: Broker, tmp_path: Path
) -> None:
    await delete_topics(kafka_session)
    composed = Composed(kafka_session, tmp_path)
    assert "klaxon.control" in await composed.done("topics")
    await composed.done("topics", "topics", "check")
    await composed.done("migrate")
    made = await composed.done("keys")
    assert made.count("private key") == 2
    assert "nothing was made" in await composed.done("keys"), "keys outlive a second start"
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    async with AsyncExitStack() as stack:
        started = {
            name: await stack.enter_async_context(composed.process(name)) for name in (*WORKERS, "router")
        }
        for name in WORKERS:
            await started[name].until_log(f"{name}: ready", timeout_s=120)
        await composed.done("gate", "rollout", "start", str(spec), "--timeout", "90")
        await started["router"].until_log("m1 99 % · m2 1 %", timeout_s=120)
        assert all(process.running for process in started.values())
        codes = await asyncio.gather(*(process.stop(timeout_s=45) for process in started.values()))
        assert codes == [0] * len(codes)
