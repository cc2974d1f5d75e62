"""Engines: whether their answers hold what is compared. Those of the gateway, and those named by --engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from agents.engines.logprobs import EngineAwayError, ask
from agents.gateway.checking import check_engines
from agents.gateway.settings import GatewaySettings
from pipeline.cli.doctor.findings import Finding
from pipeline.cli.gateway_check import checked_findings
from pipeline.errors import PipelineError
from pipeline.secret import Secret, read_secret_file, without_password
from pipeline.tls import client_context
from schemas.events import Arm


def engine_findings(urls: Iterable[str]) -> Iterator[Finding]:
    """Asks each for one token. Blocks."""
    for url in urls:
        where = f"engine at {without_password(url)}"
        try:
            asked = ask(url)
        except EngineAwayError as error:
            yield Finding(
                severity="error",
                code="engine_unreachable",
                where=where,
                what=str(error),
                remedy="start it, or correct --engine",
            )
            continue
        for lack in asked.lacks:
            yield Finding(
                severity="error" if lack.fatal else "warning",
                code="engine_logprobs",
                where=where,
                what=f"{asked.model}: {lack.what}",
                remedy=lack.remedy,
            )


def pool_findings(settings: GatewaySettings) -> Iterator[Finding]:
    """Asks the engines of a configured gateway what `klaxon gateway --check` asks. Blocks."""
    if not settings.pools:
        return
    try:
        credentials: dict[Arm, str | None] = {
            pool.arm: read_secret_file(pool.mirror_authorization_file).reveal()
            for pool in settings.pools
            if pool.mirror_authorization_file is not None
        }
        tls = None if settings.ca_file is None else client_context(settings.ca_file, None, None, Secret())
    except PipelineError as error:
        what, _, remedy = str(error).partition("; ")
        yield Finding(
            severity="note",
            code="not_checked",
            where="gateway.pools",
            what=f"the engines: {what}",
            remedy=remedy or "look from the gateway's machine: klaxon gateway --check",
        )
        return
    yield from checked_findings(asyncio.run(check_engines(settings, credentials, tls)))
