"""`klaxon gateway` as a process before engines, users that ask it, and what it published, read back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from pipeline.cli.demo.ports import free_port
from pipeline.secret_key_file import KeyKind, create_secret_key_file, new_secret_key
from schemas.codec import decode_requests
from schemas.control import Applied, Directive
from schemas.topics import CONTENT_TYPE, JSON, Topic, gating_partition
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import dump, now_us, producer
from tests.kafka.waiting import eventually
from tests.system.judge import decode_pairs
from tests.system.stack import Consumed

ARMS: Final = ("baseline", "canary", "control")
NATS: Final = 2**-30
"""The unit of scores."""
PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Pool:
    """One arm's engines, named after the arm."""

    arm: str
    urls: Sequence[str]
    kind: str = "llama.cpp"

    def section(self) -> dict[str, Any]:
        """As section `gateway` wants it."""
        return {
            "arm": self.arm,
            "kind": self.kind,
            "model_version": "m2" if self.arm == "canary" else "m1",
            "engines": [
                {"node": f"{self.arm}-{number}", "url": url} for number, url in enumerate(self.urls, start=1)
            ],
        }


@dataclass
class Gateway:
    """A running gateway."""

    worker: Worker
    url: str
    statuses: list[int] = field(default_factory=list)
    """What users were answered with."""

    async def ask(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any], path: str = "/v1/chat/completions"
    ) -> bytes:
        """One user's request; returns what came, whole."""
        async with session.post(self.url + path, json=body) as answer:
            said = await answer.read()
        self.statuses.append(answer.status)
        return said


def section(
    rollout: str, pools: Sequence[Pool], port: int, folder: Path, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Section `gateway`: every request is mirrored to every other arm."""
    mirror = {"rate": 1.0, "tokens_per_s": 10_000_000, "per_signature_per_minute": 1_000}
    return {
        "port": port,
        "rollout": rollout,
        "name": f"gateway-of-{rollout}",
        "pools": [pool.section() for pool in pools],
        "privacy": {
            "signature_key_file": str(_secret_key(folder, KeyKind.SIGNATURE)),
            "pseudonym_key_file": str(_secret_key(folder, KeyKind.PSEUDONYM)),
        },
        **more,
        "mirror": mirror | more.get("mirror", {}),
    }


def _secret_key(folder: Path, kind: KeyKind) -> Path:
    """A secret key in this folder, made where there is none."""
    path = folder / f"{kind.value}.key"
    if not path.exists():
        create_secret_key_file(path, new_secret_key(kind, time.time_ns() // 1000, days=1))
    return path


@asynccontextmanager
async def gateway(
    broker: Broker,
    folder: Path,
    rollout: str,
    pools: Sequence[Pool],
    *,
    more: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Gateway]:
    """`klaxon gateway` before these pools; stopped at the end, as an operator stops it."""
    port = free_port()
    path = folder / f"gateway-{rollout}-{port}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps({"gateway": section(rollout, pools, port, folder, more or {})}))
    command = (*KLAXON, "gateway", "--config", str(path))
    worker = Worker(
        "gateway",
        broker,
        folder,
        environment={"KLAXON_MONITORING_GATEWAY_PORT": "0", **(environment or {})},
        command=command,
    )
    async with worker:
        made = Gateway(worker, f"http://127.0.0.1:{port}")
        await _until_listening(worker, port)
        yield made
        if worker.running:
            code = await worker.stop()
            assert code == 0, f"the gateway ended with {code}:\n{worker.log}"


async def _until_listening(worker: Worker, port: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            assert worker.running, f"the gateway ended at its start:\n{worker.log}"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return


async def direct(broker: Broker, rollout: str, *, lease_s: int = 3_600) -> None:
    """A directive as a gate would sign it: everything to the baseline. No gate renews it."""
    directive = Directive(
        rollout=rollout,
        generation=1,
        epoch=1,
        ts_us=now_us(),
        lease_until_us=now_us() + lease_s * 1_000_000,
        dead_man_us=lease_s * 1_000_000,
        state="observing",
        weights={"m1": 100.0, "m2": 0.0},
        last_promoted={"m1": 100.0},
        fallback="m1",
    )
    key, value = rollout.encode(), msgspec.json.encode(directive)
    async with producer(broker) as client:
        await client.send_and_wait(
            Topic.CONTROL.value,
            value,
            key=key,
            partition=gating_partition(rollout),
            headers=[(CONTENT_TYPE, JSON.encode()), keys.directive_header(key, value)],
        )


async def until_obeyed(broker: Broker, rollout: str, epoch: int = 1) -> None:
    """Wait until a gateway says that it obeys this directive of the roll-out, or a later one."""

    async def obeyed() -> bool:
        reports = [
            msgspec.json.decode(said.value, type=Applied) for said in await dump(broker, Topic.APPLIED)
        ]
        return any(report.rollout == rollout and report.epoch >= epoch for report in reports)

    await eventually(obeyed)


@dataclass(frozen=True, slots=True)
class Told:
    """A request event, as far as it is looked at."""

    arm: str
    shadow: bool
    status: int
    node: str | None
    error: str | None
    ts_us: int
    ttft_us: int
    output_tokens: int


def told(records: Sequence[Consumed], rollout: str) -> list[Told]:
    """The roll-out's request events among records of `klaxon.requests`."""
    found = []
    for record in records:
        columns = decode_requests(record.value, _content_type(record)).columns
        for row in range(columns.n):
            if columns.labels["rollout"].get(row) == rollout:
                found.append(
                    Told(
                        ARMS[int(columns.arm[row])],
                        bool(columns.shadow[row]),
                        int(columns.status[row]),
                        columns.labels["node"].get(row),
                        columns.labels["error"].get(row),
                        int(columns.ts_us[row]),
                        int(columns.ttft_us[row]),
                        int(columns.output_tokens[row]),
                    )
                )
    return found


def scores(records: Sequence[Consumed], rollout: str) -> dict[str, list[float]]:
    """Arm → `kl_lower` of each of its pairs, in nats, from records of `klaxon.pairs`."""
    found: dict[str, list[float]] = {"canary": [], "control": []}
    for record in records:
        batch = decode_pairs(record.value)
        for number, name in enumerate(batch.rollout):
            if batch.dictionary[name] == rollout:
                found[ARMS[batch.arm[number]]].append(batch.kl_lower[number] * NATS)
    return found


def _content_type(record: Consumed) -> str | None:
    return next((value.decode() for name, value in record.headers if name == CONTENT_TYPE), None)
