"""What the gateway costs: time to first token, CPU, and what a canary that fails does to users.

Engines are fakes; they, the users and the gateway are processes of their own, and CPU is the gateway's alone.
All that is compared is measured in turn in one run. The reference for CPU is a plain proxy of the same HTTP
library, which reads nothing of what passes; the gateway measures every answer, and mirrors MIRROR_RATE of the
requests, captured with five log-probabilities a token.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

import aiohttp
import msgspec

from tests.bench.context import Context
from tests.bench.drain import cpu_s
from tests.bench.errors import BenchError
from tests.bench.rows import Row, Spread, row
from tests.bench.users import Users
from tests.conftest import REPOSITORY
from tests.kafka.broker import Broker
from tests.system.gateway import Gateway, Pool, direct, free_port, gateway, until_obeyed

MIRROR_RATE: Final = 0.05
"""The shipped default."""
CPU_FLOOR: Final = 0.6
P99_CEILING: Final = 1.1
AT_ONCE: Final = 8
PLENTY: Final = {"tokens_per_s": 10_000_000, "per_signature_per_minute": 1_000, "timeout_s": 60}
"""Nothing but the rate bounds what is mirrored."""
A_TOKEN: Final = ("--first-token-s", "0.04", "--token-s", "0.003")
"""An engine that takes about as long as a small one does."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What answers look like."""

    name: str
    """What is added to the rows' names."""
    engine: tuple[str, ...]
    users: tuple[str, ...]
    at_once: int
    requests: int
    """A round."""


AS_ENGINES_ANSWER: Final = Shape(
    "", ("--first-token-s", "0.02", "--token-s", "0.005"), ("--tokens", "64"), 16, 250
)
"""Judged. A token at a time and some ms apart, short of what chats are answered, several streams at once."""
IN_ONE_PIECE: Final = Shape("_at_once", (), (), AT_ONCE, 1_500)
"""No engine's: an answer in one piece, which a proxy passes with two reads and two writes. Printed beside."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which the mirrored side fails; arguments of the canary's engine, None: there is none."""

    name: str
    canary: tuple[str, ...] | None = A_TOKEN
    mirror: Mapping[str, Any] = field(default_factory=dict)
    kafka_away: bool = False
    control_silent: bool = False
    users_gone: bool = False


FAULTS: Final = (
    Fault("none"),
    Fault("canary_down", None),
    Fault("canary_slow", ("--first-token-s", "5")),
    Fault("canary_garbage", ("--fault", "garbage")),
    Fault("canary_hangs", (*A_TOKEN, "--fault", "hang")),
    Fault("canary_1_mb_chunks", (*A_TOKEN, "--fault", "huge")),
    Fault("500_copies_stuck", ("--fault", "silent"), {"rate": 1.0, "concurrency": 500, "queue": 500}),
    Fault("queue_full", ("--fault", "silent"), {"rate": 1.0, "concurrency": 1, "queue": 1}),
    Fault("kafka_away", kafka_away=True),
    Fault("control_silent", control_silent=True),
    Fault("users_gone", users_gone=True),
)


async def gateway_rows(context: Context) -> list[Row]:
    """All of them."""
    broker = await context.with_partitions(2, append_time=True)
    return [
        *await _costs(context, broker, AS_ENGINES_ANSWER),
        *await _costs(context, broker, IN_ONE_PIECE),
        *await _faults(context, broker),
    ]


# --- CPU and time to first token ------------------------------------------------------------------------


async def _costs(context: Context, broker: Broker, shape: Shape) -> list[Row]:
    name = shape.name
    async with AsyncExitStack() as exits:
        engine = await exits.enter_async_context(_engine(*shape.engine))
        canary = await exits.enter_async_context(_engine(*shape.engine))
        proxy = await exits.enter_async_context(_program("tests.bench.plain_proxy", engine.url))
        pools = [Pool("baseline", [engine.url], "vllm"), Pool("canary", [canary.url], "vllm")]
        through = await exits.enter_async_context(
            _gateway(context, broker, f"costs{name}", pools, {"rate": MIRROR_RATE, **PLENTY})
        )
        sides = {"bare": engine, "proxy": proxy, "gateway": _Side(through.url, through.worker.pid)}
        for side in sides.values():
            await _ask(side.url, 200, shape.at_once, *shape.users)
        context.say(f"requests per CPU second{name}")
        before, asked = await _asked(canary), 0
        per_cpu_s: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(context.rounds(5, 2)):
            for who, side in sides.items():
                spent_s = cpu_s(side.pid)
                users = await _ask(side.url, shape.requests, shape.at_once, *shape.users)
                per_cpu_s[who].append(users.answered / (cpu_s(side.pid) - spent_s))
                asked += users.answered * (who == "gateway")
        mirrored = (await _asked(canary) - before) / asked
        context.say(f"time to first token{name}")
        ttft_ms: dict[str, list[float]] = {who: [] for who in sides}
        for _ in range(context.rounds(6, 3)):
            for who, side in sides.items():
                ttft_ms[who] += (await _ask(side.url, 100, 1, "--tokens", "2")).ttft_ms
    return _cost_rows(name, per_cpu_s, ttft_ms, mirrored)


def _cost_rows(
    name: str,
    per_cpu_s: Mapping[str, Sequence[float]],
    ttft_ms: Mapping[str, Sequence[float]],
    mirrored: float,
) -> list[Row]:
    ratios = {
        who: Spread(
            tuple(ours / theirs for ours, theirs in zip(per_cpu_s["gateway"], per_cpu_s[who], strict=True))
        )
        for who in ("proxy", "bare")
    }
    added = {
        f"{who}_{label}": _quantile(ttft_ms["gateway"], q) - _quantile(ttft_ms[who], q)
        for who in ("bare", "proxy")
        for label, q in (("p50", 0.5), ("p99", 0.99))
    }
    against = f"gateway.cpu_against_plain_proxy{name}"
    return [
        row(f"gateway.mirror_rate{name}", mirrored, "share"),
        row(f"gateway.requests_per_cpu_s{name}", max(per_cpu_s["gateway"]), "requests/s"),
        *(
            [row(against, ratios["proxy"].median, "ratio")]
            if name
            else ratios["proxy"].rows(against, floor=CPU_FLOOR)
        ),
        row(f"gateway.cpu_against_bare_engine{name}", ratios["bare"].median, "ratio"),
        *(row(f"gateway.added_ttft_to_{who}{name}", value, "ms") for who, value in added.items()),
    ]


# --- faults ---------------------------------------------------------------------------------------------


async def _faults(context: Context, broker: Broker) -> list[Row]:
    """Users' p99 through a gateway whose mirrored side fails, against one that mirrors nothing."""
    rows: list[Row] = []
    async with AsyncExitStack() as exits:
        engine = await exits.enter_async_context(_engine(*A_TOKEN))
        port = free_port()
        pools = [
            Pool("baseline", [engine.url], "vllm"),
            Pool("canary", [f"http://127.0.0.1:{port}"], "vllm"),
        ]
        plain = await exits.enter_async_context(
            _gateway(context, broker, "no-mirror", pools, {"rate": 0.0, **PLENTY})
        )
        await _ask(plain.url, 100, AT_ONCE)
        for fault in FAULTS:
            context.say(f"fault: {fault.name}")
            rows += await _fault(context, broker, fault, (plain, port, pools))
    return rows


async def _fault(
    context: Context, broker: Broker, fault: Fault, against: tuple[Gateway, int, Sequence[Pool]]
) -> list[Row]:
    plain, port, pools = against
    count, failed = context.rounds(150, 100), 0
    totals_ms: dict[str, list[float]] = {"plain": [], "faulty": []}
    async with AsyncExitStack() as exits:
        if fault.canary is not None:
            await exits.enter_async_context(_engine(*fault.canary, "--port", str(port)))
        through = await exits.enter_async_context(
            _gateway(
                context,
                broker,
                f"fault-{fault.name}",
                pools,
                {"rate": MIRROR_RATE, **PLENTY, **fault.mirror},
                silent=fault.control_silent,
            )
        )
        await _ask(through.url, 600 if "500" in fault.name else 100, AT_ONCE)
        for _ in range(context.rounds(4, 1)):
            totals_ms["plain"] += (await _users(plain.url, count, fault)).total_ms
            with _frozen(context.broker_pid) if fault.kafka_away else nullcontext():
                users = await _users(through.url, count, fault)
            totals_ms["faulty"] += users.total_ms
            failed += users.failed
    ratio = _quantile(totals_ms["faulty"], 0.99) / _quantile(totals_ms["plain"], 0.99)
    return [
        row(f"gateway.p99_with_{fault.name}", ratio, "ratio", ceiling=P99_CEILING),
        row(f"gateway.failed_with_{fault.name}", failed, "requests", ceiling=0),
    ]


async def _users(url: str, count: int, fault: Fault) -> Users:
    """What patient users saw; others may hang up meanwhile, on either side."""
    asking = [_ask(url, count, AT_ONCE)]
    if fault.users_gone:
        asking.append(_ask(url, count, 2, "--hang-up"))
    users, *_ = await asyncio.gather(*asking)
    return users


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """A process that is stopped meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """A server that users ask."""

    url: str
    pid: int


@asynccontextmanager
async def _program(module: str, *arguments: str) -> AsyncIterator[_Side]:
    """A module that prints its port and serves until it is ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert process.stdout is not None
        port = await process.stdout.readline()
        if not port:
            raise BenchError(f"{module} ended with code {await process.wait()} at its start")
        yield _Side(f"http://127.0.0.1:{int(port)}", process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _engine(*arguments: str) -> Any:
    return _program("tests.agents.gateway.fake_engine", "vllm", *arguments)


@asynccontextmanager
async def _gateway(
    context: Context,
    broker: Broker,
    rollout: str,
    pools: Sequence[Pool],
    mirror: Mapping[str, Any],
    *,
    silent: bool = False,
) -> AsyncIterator[Gateway]:
    """A gateway that obeys a directive: nothing to the canary. `silent`: its lease is over soon, for good."""
    await direct(broker, rollout, lease_s=1 if silent else 3_600)
    more = {"mirror": mirror, "drain_s": 1}
    async with gateway(broker, context.folder, rollout, pools, more=more) as through:
        await until_obeyed(broker, rollout)
        if silent:
            await asyncio.sleep(3)
        yield through


async def _ask(url: str, requests: int, at_once: int, *more: str) -> Users:
    """What users saw, who are a process of their own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.bench.users", url, "--requests", str(requests), "--at-once", str(at_once), *more),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    try:
        told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BenchError(f"users of {url} ended with code {process.returncode}")
    users = msgspec.json.decode(told, type=Users)
    if "--hang-up" not in more and not users.answered:
        raise BenchError(f"users of {url} were answered nothing")
    return users


async def _asked(engine: _Side) -> int:
    """How many answers an engine was asked for so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/asked") as answer:
        count: int = (await answer.json())["asked"]
        return count


def _quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(ceil(q * len(values)) - 1, 0)]
