"""`klaxon gateway --check`: what engines answer a copy, what of it cannot be compared, and what to do."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from agents.gateway.checking import Checked, EngineChecked, check_engines
from agents.gateway.embedding import Embedder
from agents.gateway.settings import GatewaySettings
from pipeline.cli.doctor.findings import Finding, by_severity, exit_code, line
from pipeline.cli.exits import Exit
from pipeline.cli.printing import counted, printed
from pipeline.core.visible import visible
from schemas.events import Arm

CODES: Final[Mapping[str, str]] = {
    "away": "engine_unreachable",
    "credential": "engine_credential",
    "model": "engine_model",
    "refused": "engine_refused",
    "logprobs": "engine_logprobs",
    "stream": "engine_not_streaming",
    "forced": "engine_free_running",
    "definition": "engine_definition",
    "path": "engine_path",
}
"""Codes of findings by those of problems."""
SAMPLE: Final = "Water is wet."
"""What an embedding is asked of."""


def check_gateway(
    settings: GatewaySettings,
    credentials: Mapping[Arm, str | None],
    embedder: Embedder,
    *,
    tls: ssl.SSLContext | None,
    text_key_until_us: int | None,
    as_json: bool,
) -> Exit:
    """Ask every engine for one token, and print what was found. Blocks; changes nothing anywhere.

    `credentials`: `Authorization` of copies by arm. `text_key_until_us`: when the key of texts grows too old;
    None: there is none.
    """
    checked, dimensions = asyncio.run(_ask(settings, credentials, embedder, tls))
    found = by_severity(
        [
            *checked_findings(checked),
            *_configuration_findings(settings, text_key_until_us),
            *_embedding_findings(settings, dimensions),
        ]
    )
    code = exit_code(found)
    if as_json:
        engines = [_told(engine) for engine in checked.engines]
        said: dict[str, Any] = {"ok": code is Exit.OK, "engines": engines, "embedding_dimensions": dimensions}
        said["findings"] = found
        click.echo(msgspec.json.encode(said).decode())
        return code
    printed(lambda console: _print(console, checked, found))
    return code


async def _ask(
    settings: GatewaySettings,
    credentials: Mapping[Arm, str | None],
    embedder: Embedder,
    tls: ssl.SSLContext | None,
) -> tuple[Checked, int | None]:
    checked = await check_engines(settings, credentials, tls)
    embedding = await embedder.embed(SAMPLE) if settings.embeddings.url is not None else None
    await embedder.close()
    return checked, None if embedding is None else len(embedding)


def checked_findings(checked: Checked) -> Iterator[Finding]:
    """What is wrong with engines, and in what they differ that should not."""
    for engine in checked.engines:
        for problem in engine.problems:
            yield Finding(
                severity="error" if problem.fatal else "warning",
                code=CODES[problem.code],
                where=f"{engine.arm}, engine {engine.node}",
                what=problem.what,
                remedy=problem.remedy,
            )
    for one in checked.differences:
        between = "arms" if one.between_arms else "engines of one arm"
        remedy = (
            "start all with the same flags: answers of these are not compared"
            if one.fatal
            else "start all with the same flags, or take the difference for a part of what is compared"
        )
        yield Finding(
            severity="error" if one.fatal else "warning",
            code="engines_differ",
            where=between,
            what=str(one),
            remedy=remedy,
        )


def _configuration_findings(settings: GatewaySettings, text_key_until_us: int | None) -> Iterator[Finding]:
    arms = {pool.arm for pool in settings.pools}
    section = "gateway"
    if "canary" not in arms:
        yield Finding(
            severity="note",
            code="no_canary",
            where=f"{section}.pools",
            what="no pool of the arm canary: nothing is compared",
            remedy="add one when there is something to roll out",
        )
    mirror = settings.mirror
    if mirror.rate == 0 or not (mirror.paths.chat or mirror.paths.completions):
        yield Finding(
            severity="warning",
            code="nothing_mirrored",
            where=f"{section}.mirror",
            what="no request is mirrored: nothing is compared",
            remedy="set mirror.rate above 0 and a path of mirror.paths to true",
        )
    if text_key_until_us is not None and text_key_until_us <= time.time_ns() // 1_000:
        yield Finding(
            severity="error",
            code="text_key_too_old",
            where=f"{section}.privacy.text_key_file",
            what="its key is past its time: no text is sealed with it, so none leaves",
            remedy="klaxon keys rotate (docs/security.md)",
        )


def _embedding_findings(settings: GatewaySettings, dimensions: int | None) -> Iterator[Finding]:
    if settings.embeddings.url is not None and dimensions is None:
        yield Finding(
            severity="error",
            code="embeddings",
            where="gateway.embeddings",
            what="its endpoint answers no embedding",
            remedy="look at its log; correct url, model or authorization_file",
        )


def _told(engine: EngineChecked) -> dict[str, Any]:
    """One engine, for `--json`."""
    facts = engine.facts
    return {
        "arm": engine.arm,
        "node": engine.node,
        "engine": facts.label,
        "model": facts.model,
        "definition": facts.definition,
        "deterministic": facts.deterministic,
        "kv_type": facts.kv_type,
        "max_logprobs": facts.max_logprobs,
        "forced": {"yes": True, "no": False}.get(engine.forced),
        "paths": [
            {
                "path": path.path,
                "candidates": path.candidates,
                "tokens_by": path.identity,
                "ttft_us": path.ttft_us,
                "ok": not any(problem.fatal for problem in path.problems),
            }
            for path in engine.paths
        ],
    }


def _print(console: Console, checked: Checked, found: list[Finding]) -> None:
    heads = ("arm", "engine", "what it is", "path", "candidates", "tokens by", "forced")
    table = Table(*heads, box=None, pad_edge=False)
    for engine in checked.engines:
        head = (engine.arm, visible(engine.node), visible(engine.facts.label))
        for path in engine.paths or (None,):
            said = ("", "", "") if path is None else (path.path, str(path.candidates), path.identity)
            table.add_row(*head, *said, engine.forced)
            head = ("", "", "")
    console.print(table)
    for one in found:
        console.print(line(one), markup=False)
    errors = sum(one.severity == "error" for one in found)
    others = counted(len(found) - errors, "other finding")
    console.print(f"{counted(errors, 'error')}, {others}" if found else "every engine can be compared")
