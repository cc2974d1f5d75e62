"""What the doctor finds: how bad, what, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from pipeline.cli.exits import Exit
from pipeline.core.visible import visible

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
"""`error`: something does not work, or will not. `warning`: it works, and somebody should look. `note`: as it
was meant, and worth knowing."""

UNREACHABLE: Final = ("kafka_unreachable", "clickhouse_unreachable", "engine_unreachable")
"""Codes of findings about a service that is away: exit code 3."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be. `remedy`: a command line where there is one."""

    severity: Severity
    code: str
    what: str
    where: str
    remedy: str


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, else in the order in which they were found."""
    return sorted(findings, key=lambda one: SEVERITIES.index(one.severity))


def exit_code(findings: Iterable[Finding]) -> Exit:
    """A configuration that is wrong goes before a service that is away, and that before any other error."""
    errors = [one for one in findings if one.severity == "error"]
    if any(one.code == "configuration" for one in errors):
        return Exit.USAGE
    if any(one.code in UNREACHABLE for one in errors):
        return Exit.UNREACHABLE
    return Exit.BAD if errors else Exit.OK


def line(one: Finding) -> str:
    """Two lines for a person."""
    return f"{one.severity}: {visible(one.where)}: {visible(one.what)}\n    → {visible(one.remedy)}"
