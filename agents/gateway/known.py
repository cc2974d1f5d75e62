"""What is known of all engines: their facts, read at the start and again when one came back; who differs.

Bounded by the configuration: one entry an engine. `lost` costs a dictionary access.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp

from agents.gateway.facts import DEFINITIONS, EngineFacts, read_facts
from agents.gateway.settings import PoolSettings
from schemas.plain import Log, Plain

log: Log = logging.getLogger(__name__)

AGAIN_S: Final = 300.0
"""How often an engine that never went away is asked again: it may have been restarted unnoticed."""
RETRY_S: Final = 5.0
"""Between two rounds for engines that came back or could not be asked."""
_AT_ONCE: Final = 16
_NAMED: Final = 3
"""Nodes that a difference names of each side."""


@dataclass(frozen=True, slots=True)
class Precheck:
    """What `model.infer.precheck` says of the engine that a request goes to."""

    hot_updated: bool
    """Generation, model version or the engine's load is another than this process' last request to it met;
    the first request to an engine met none, so nothing has changed for it."""
    load_us: int | None
    """How long its last load took, as seen from here: from the first failed connection until its facts were
    read again. At the start, and where it changed without being missed: the reading alone. None: not read."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Engines that should agree and do not."""

    what: str
    """definition, kind of numbers, determinism, most candidates, KV type, version."""
    between_arms: bool
    """False: inside one pool."""
    fatal: bool
    """Their log-probabilities cannot be compared."""
    sides: tuple[tuple[str, tuple[str, ...]], ...]
    """What is said, and by which nodes."""

    def __str__(self) -> str:
        told = []
        for value, nodes in self.sides:
            more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
            told.append(f"{value} ({', '.join(nodes[:_NAMED])}{more})")
        return f"{self.what}: {' against '.join(told)}"


@dataclass(slots=True)
class _Engine:
    pool: PoolSettings
    node: str
    url: str
    facts: EngineFacts
    loads: int = 0
    load_us: int | None = None
    lost_us: int | None = None
    """Since when no connection comes about; None: it answers."""
    due: bool = True
    met: tuple[int | None, str, int] | None = None
    """Generation, version and load that the last request to it met."""


@dataclass(slots=True)
class KnownEngines:
    """One per gateway."""

    pools: Sequence[PoolSettings]
    session: aiohttp.ClientSession
    clock_us: Callable[[], int]
    """Monotonic."""
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Arm → `Authorization` of the gateway's own requests to its engines."""
    again_s: float = AGAIN_S
    retry_s: float = RETRY_S
    says_differences: bool = True
    """In the log, each once."""
    _engines: dict[str, _Engine] = field(init=False)
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _told: tuple[Difference, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self._engines = {
            engine.node: _Engine(pool, engine.node, engine.url, stated(EngineFacts(kind=pool.kind), pool))
            for pool in self.pools
            for engine in pool.engines
        }

    def of(self, node: str) -> EngineFacts:
        """The last facts of an engine; before any were read: its kind, and what the configuration states."""
        return self._engines[node].facts

    def lost(self, node: str) -> None:
        """A connection to it failed: it is asked again and again what it is, until it answers."""
        engine = self._engines[node]
        if engine.lost_us is None:
            engine.lost_us = self.clock_us()
            engine.due = True
            self._wake.set()

    def precheck(self, node: str, generation: int | None, model_version: str) -> Precheck:
        """Of a request that goes to it now; remembers what it met."""
        engine = self._engines[node]
        meets = (generation, model_version, engine.loads)
        changed = engine.met is not None and engine.met != meets
        engine.met = meets
        return Precheck(hot_updated=changed, load_us=engine.load_us)

    async def read_all(self) -> None:
        """Ask every engine, some at once. Never raises; an engine that is away is asked again by `keep`."""
        for engine in self._engines.values():
            engine.due = True
        await self._read_due()

    async def keep(self) -> None:
        """Until cancelled: ask again who came back or was away, and everybody now and then."""
        while True:
            waits_s = self.retry_s if any(engine.due for engine in self._engines.values()) else self.again_s
            try:
                async with asyncio.timeout(waits_s):
                    await self._wake.wait()
                await asyncio.sleep(self.retry_s)
            except TimeoutError:
                if waits_s == self.again_s:
                    for engine in self._engines.values():
                        engine.due = True
            self._wake.clear()
            await self._read_due()

    async def _read_due(self) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def read(engine: _Engine) -> None:
            async with gate:
                await self._read(engine)

        async with asyncio.TaskGroup() as group:
            for engine in self._engines.values():
                if engine.due:
                    group.create_task(read(engine))
        found = tuple(self.differences())
        for one in found:
            if self.says_differences and one not in self._told:
                log.warning("engines differ, %s", Plain(str(one)))
        self._told = found

    async def _read(self, engine: _Engine) -> None:
        since_us = self.clock_us()
        credential = self.credentials.get(engine.pool.arm)
        headers = {} if credential is None else {"authorization": credential}
        said = await read_facts(self.session, engine.pool.kind, engine.url, headers=headers)
        facts = stated(said, engine.pool)
        if not facts.complete:
            return  # what was known of it stays; it is due still
        engine.due = False
        came_back = engine.lost_us is not None
        if came_back or facts != engine.facts:
            engine.loads += 1
            engine.load_us = self.clock_us() - (since_us if engine.lost_us is None else engine.lost_us)
        engine.facts, engine.lost_us = facts, None

    def differences(self) -> Iterator[Difference]:
        """Between arms: what decides whether their answers can be compared. Inside a pool: everything."""
        known = [engine for engine in self._engines.values() if engine.facts.complete]
        for what, fatal, value in _COMPARED:
            yield from _differs(known, what, value, fatal=fatal, between_arms=True)
        for pool in self.pools:
            inside = [engine for engine in known if engine.pool is pool]
            for what, value in _SAME_IN_A_POOL:
                yield from _differs(inside, what, value, fatal=False, between_arms=False)

    def gauges(self) -> dict[str, int]:
        """How much is known."""
        engines = self._engines.values()
        return {
            "engines": len(engines),
            "engines_known": sum(engine.facts.complete for engine in engines),
            "engines_lost": sum(engine.lost_us is not None for engine in engines),
            "engine_loads": sum(engine.loads for engine in engines),
            "engine_differences": len(self._told),
        }


def stated(facts: EngineFacts, pool: PoolSettings) -> EngineFacts:
    """With what the configuration states, where the engine says nothing."""
    return replace(
        facts,
        kv_type=facts.kv_type or pool.kv_type,
        deterministic=pool.deterministic if facts.deterministic is None else facts.deterministic,
    )


def _definition_of(engine: _Engine) -> str:
    """As the configuration states it, else as the engine says, else as its kind answers."""
    return engine.pool.definition or engine.facts.definition or DEFINITIONS[engine.pool.kind]


def _said(value: object) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value is None else str(value)


_Value = Callable[[_Engine], str | None]
_COMPARED: Final[tuple[tuple[str, bool, _Value], ...]] = (
    ("definition of log-probabilities", True, _definition_of),
    ("logits in place of log-probabilities", True, lambda engine: _said(engine.facts.logits)),
    ("determinism", False, lambda engine: _said(engine.facts.deterministic)),
    ("most candidates a position", False, lambda engine: _said(engine.facts.max_logprobs)),
)
_SAME_IN_A_POOL: Final[tuple[tuple[str, _Value], ...]] = (
    ("version", lambda engine: engine.facts.version),
    ("KV type", lambda engine: engine.facts.kv_type),
    ("model", lambda engine: engine.facts.model),
    ("weights", lambda engine: engine.facts.weights),
)


def _differs(
    engines: Sequence[_Engine], what: str, value: _Value, *, fatal: bool, between_arms: bool
) -> Iterator[Difference]:
    """One, where those that say it do not agree."""
    sides: dict[str, list[str]] = {}
    for engine in engines:
        said = value(engine)
        if said is not None:
            sides.setdefault(said, []).append(engine.node)
    if len(sides) > 1:
        told = tuple((said, tuple(nodes)) for said, nodes in sides.items())
        yield Difference(what, between_arms, fatal, told)
