"""Ask every engine what a mirrored copy will ask it, and say what of its answer cannot be compared.

One greedy token of a fixed question, streamed, with the pool's own credential, read by the code that reads
copies; besides the facts, and the same token scored again. It costs an engine next to nothing, and no user's
text is needed. Nothing here raises: what is wrong is a `Problem`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import aiohttp
import msgspec

from agents.engines.logprobs import QUESTION
from agents.gateway.asking import ALL_OURS, CHAT, COMPLETIONS, Asked, read_asked, shadow_body
from agents.gateway.capture import Capture, Captured
from agents.gateway.facts import EngineFacts
from agents.gateway.forced import forced_request, read_forced
from agents.gateway.known import Difference, KnownEngines
from agents.gateway.lacks import PathChecked, Problem, first_position, identity_of, lacks_of, weighed
from agents.gateway.relaying import mono_us
from agents.gateway.settings import EngineSettings, GatewaySettings, PoolSettings
from agents.gateway.upstream import FAILURES, failure_class, session, to_shadow
from schemas.events import Arm

TIMEOUT_S: Final = 30.0
"""Of one question: a first token may wait behind users' requests."""
MOST_BYTES: Final = 1 << 20
_AT_ONCE: Final = 16
_HEAD_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class EngineChecked:
    """What was found of one engine."""

    arm: str
    node: str
    kind: str
    facts: EngineFacts
    paths: tuple[PathChecked, ...]
    forced: Literal["yes", "no", "not tried"]
    """`no`: free-running only."""
    problems: tuple[Problem, ...]
    """Of all paths, and of the engine itself."""


@dataclass(frozen=True, slots=True)
class Checked:
    """All engines, in the order of the configuration, and in what they differ."""

    engines: tuple[EngineChecked, ...]
    differences: tuple[Difference, ...]


async def check_engines(
    settings: GatewaySettings,
    credentials: Mapping[Arm, str | None],
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Checked:
    """Ask them all, some at once. `tls`: for engines behind https; None: as the system trusts."""
    own: dict[str, str] = {arm: told for arm, told in credentials.items() if told is not None}
    connect_s = settings.connect_timeout_s
    async with session(most=_AT_ONCE, connect_s=connect_s, tls=tls, kept=False) as client:
        known = KnownEngines(settings.pools, client, mono_us, own, says_differences=False)
        await known.read_all()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def check(pool: PoolSettings, engine: EngineSettings) -> EngineChecked:
            facts, credential = known.of(engine.node), own.get(pool.arm)
            async with gate:
                return await _Asking(client, settings, pool, engine, facts, credential, timeout_s).check()

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(check(pool, engine)) for pool in settings.pools for engine in pool.engines
            ]
        return Checked(tuple(task.result() for task in tasks), tuple(known.differences()))


@dataclass(frozen=True, slots=True)
class _Asking:
    client: aiohttp.ClientSession
    settings: GatewaySettings
    pool: PoolSettings
    engine: EngineSettings
    facts: EngineFacts
    credential: str | None
    timeout_s: float

    async def check(self) -> EngineChecked:
        mirror = self.settings.mirror
        wanted = [path for path in (CHAT, COMPLETIONS) if mirror.paths.of(path)]
        model = self.pool.model_name or self.facts.model
        if model is None and self.facts.complete:
            nameless = Problem(
                "model",
                fatal=True,
                what="/v1/models names no model",
                remedy="set the pool's model_name; is this an OpenAI-compatible endpoint?",
            )
            return self._checked((), "not tried", (nameless,))
        paths: list[PathChecked] = []
        forced: Literal["yes", "no", "not tried"] = "not tried"
        problems: list[Problem] = []
        for path in wanted:
            checked, captured, asked = await self._path(path, model or "default")
            paths.append(checked)
            if any(one.code in ("away", "credential") for one in checked.problems):
                return self._checked(tuple(paths), forced, checked.problems)
            if captured is not None and forced == "not tried" and not checked.problems:
                forced, found = await self._forced(asked, captured, model)
                problems += found
        return self._checked(tuple(paths), forced, (*problems, *self._stated(), *weighed(paths)))

    def _checked(
        self,
        paths: tuple[PathChecked, ...],
        forced: Literal["yes", "no", "not tried"],
        problems: tuple[Problem, ...],
    ) -> EngineChecked:
        pool = self.pool
        return EngineChecked(pool.arm, self.engine.node, pool.kind, self.facts, paths, forced, problems)

    async def _path(self, path: str, model: str) -> tuple[PathChecked, Captured | None, Asked]:
        asked = read_asked(path, _question(path, model))
        assert asked is not None
        body = shadow_body(asked, self.pool.kind, top=self.settings.top, model=self.pool.model_name)
        copied = read_asked(path, body)
        assert copied is not None
        capture = Capture(self.pool.kind, copied, ALL_OURS, most_bytes=MOST_BYTES)
        since_us = mono_us()
        problem = await self._ask(path, body, capture)
        if problem is not None:
            return PathChecked(path, problems=(problem,)), None, asked
        captured = capture.captured()
        first_us = captured.first_token_us
        problems = tuple(lacks_of(captured, self.settings.top, copied.stream))
        position = first_position(captured)
        checked = PathChecked(
            path,
            0 if position is None else len(position.entries),
            identity_of(position),
            None if first_us is None else first_us - since_us,
            problems,
        )
        return checked, captured, asked

    async def _ask(self, path: str, body: bytes, into: Capture | bytearray) -> Problem | None:
        """None: there was an answer, and it is in `into`."""
        url = self.engine.url.rstrip("/") + path
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.client.post(
                    url, data=body, headers=to_shadow(self.credential), allow_redirects=False
                ) as answer,
            ):
                if answer.status != 200:
                    return self._refused(path, answer.status, await answer.content.read(_HEAD_BYTES))
                came = 0
                while data := await answer.content.readany():
                    came += len(data)
                    if came > MOST_BYTES:
                        break
                    if isinstance(into, Capture):
                        into.feed(data, mono_us())
                    else:
                        into += data
        except FAILURES as error:
            what = {
                "connect": "no connection comes about",
                "timeout": f"no answer within {self.timeout_s:g} s",
            }.get(failure_class(error), "the connection broke, or this is no HTTP")
            return Problem("away", fatal=True, what=f"{path}: {what}", remedy="start it, or correct its url")
        if isinstance(into, Capture):
            into.end(mono_us())
        return None

    def _refused(self, path: str, status: int, head: bytes) -> Problem:
        file = f"mirror_authorization_file of the pool of the {self.pool.arm}"
        if status in (401, 403) and self.credential is None:
            return Problem(
                "credential",
                fatal=True,
                what=f"{path}: status {status}: it wants a credential, and copies carry none",
                remedy=f"set {file}: the file holds the whole Authorization header's value",
            )
        if status in (401, 403):
            return Problem(
                "credential",
                fatal=True,
                what=f"{path}: status {status}: the credential of copies is refused",
                remedy=f"renew what is in the file named by {file}",
            )
        if status == 404:
            unknown = b"model" in head.lower()
            return Problem(
                "refused",
                fatal=True,
                what=f"{path}: status 404: it serves no such {'model' if unknown else 'path'}",
                remedy="set the pool's model_name" if unknown else "correct its url, which ends before /v1",
            )
        return Problem(
            "refused",
            fatal=True,
            what=f"{path}: status {status} to what a copy asks",
            remedy=f"see the engine's log; vLLM: --max-logprobs {self.settings.top + 1} at least",
        )

    async def _forced(
        self, asked: Asked, captured: Captured, model: str | None
    ) -> tuple[Literal["yes", "no"], list[Problem]]:
        """Whether it scores a given answer: here its own, whose log-probabilities must come back."""
        wanted = self.settings.mirror.forced
        scoring = forced_request(
            asked, captured, self.pool.kind, top=self.settings.top, model=self.pool.model_name or model
        )
        if scoring is None:
            told = Problem(
                "forced",
                fatal=False,
                what=f"free-running only: {self.pool.kind} scores no given answer over HTTP",
                remedy="mirror.forced has no effect on it: pairs are compared up to their first difference",
            )
            return "no", [told] if wanted else []
        path, body = scoring
        data = bytearray()
        problem = await self._ask(path, body, data)
        scored = Captured(error="garbled") if problem else read_forced(self.pool.kind, bytes(data), captured)
        if problem is None and scored.error is None and scored.answer is not None:
            return "yes", []
        why = problem.what if problem is not None else f"{path} did not score the tokens that were given"
        failed = Problem(
            "forced",
            fatal=False,
            what=f"free-running only: {why}",
            remedy="see the engine's log; or set mirror.forced: false",
        )
        return "no", [failed] if wanted else []

    def _stated(self) -> list[Problem]:
        """What the configuration says otherwise than the engine."""
        stated, said = self.pool.definition, self.facts.definition
        if stated is None or said is None or stated == said:
            return []
        return [
            Problem(
                "definition",
                fatal=True,
                what=f"its log-probabilities are {said}, and the pool states {stated}",
                remedy=f"take the pool's definition out, or set {said}",
            )
        ]


def _question(path: str, model: str) -> bytes:
    said = {"messages": [{"role": "user", "content": QUESTION}]} if path == CHAT else {"prompt": QUESTION}
    return msgspec.json.encode({"model": model, **said, "max_tokens": 1, "temperature": 0, "seed": 1})
