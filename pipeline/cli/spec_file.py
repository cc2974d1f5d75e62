"""Roll-out specs as people write them: YAML, and messages that name file, line and field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from pipeline.cli.exits import CommandError, Exit
from pipeline.core.gate.policy import nearest
from pipeline.core.gate.versions import SpecError, check_spec
from pipeline.policy_file import PolicyError, parse_policy, read_policy_file
from pipeline.yaml_lines import Document, YamlError, parse
from schemas.control import ArmSpec, RolloutSpec
from schemas.events import ARMS

_UNKNOWN: Final = re.compile(r"unknown field `(.+?)`")
_UNKNOWN_ARM: Final = re.compile(r"Invalid enum value '(.+?)'")
_MISSING: Final = re.compile(r"missing required field `(.+?)`")


def read_spec(path: str, policy_path: str | None) -> RolloutSpec:
    """The spec in this file, with the policy it will run under where it or `policy_path` names one.

    Raises CommandError (exit 2). Blocks.
    """
    document = _read(path)
    if not isinstance(document.data, dict):
        raise _mistake(path, 1, "", "a roll-out spec is expected: rollout, arms, fallback")
    if not document.data.get("fallback"):
        raise _mistake(
            path,
            document.line_of(("fallback",)),
            "fallback",
            "missing: name the version to fall back to (G9)",
        )
    try:
        spec = msgspec.convert(document.data, RolloutSpec)
    except msgspec.ValidationError as error:
        raise _explain(path, document, str(error)) from None
    try:
        check_spec(spec, spec.rollout)
    except SpecError as error:
        field, _, problem = str(error).partition(": ")
        raise _mistake(path, document.line_of((field,)), field, problem) from None
    try:
        if policy_path is not None:
            return replace(spec, policy=read_policy_file(policy_path).text, policy_hash=None)
        if spec.policy is not None:
            parse_policy(spec.policy, f"{path}: policy")
    except PolicyError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    return spec


def _read(path: str) -> Document:
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(
            f"{path}: cannot be read: {error.strerror}; name another file", Exit.USAGE
        ) from None
    except UnicodeDecodeError:
        raise CommandError(f"{path}: not UTF-8 text; save it as UTF-8", Exit.USAGE) from None
    except YamlError as error:
        raise _mistake(path, error.line, "", f"{error}; mend the YAML there") from None


def _explain(path: str, document: Document, message: str) -> CommandError:
    what, _, at = message.partition(" - at `")
    parts: tuple[str | int, ...] = tuple(
        int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]$`]+", at)
    )
    found = _UNKNOWN_ARM.search(what)
    if found and " in `$.arms" in at:
        parts, what = ("arms",), f"unknown arm {found[1]!r}{nearest(found[1], ARMS)}"
    found = _UNKNOWN.search(what)
    if found:
        parts = _arm_with(document, found[1], parts)
        known = ArmSpec.__struct_fields__ if parts[:1] == ("arms",) else RolloutSpec.__struct_fields__
        what = f"unknown field {found[1]!r}{nearest(found[1], known)}"
        parts = (*parts, found[1])
    found = _MISSING.search(what)
    if found:
        parts = (*parts, found[1])
    return _mistake(path, document.line_of(parts), ".".join(str(part) for part in parts), what)


def _arm_with(document: Document, field: str, parts: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """A message about arms does not say which: the one that holds the unknown field."""
    if parts == ("arms",) and isinstance(document.data, dict) and isinstance(document.data["arms"], dict):
        for name, arm in document.data["arms"].items():
            if isinstance(arm, dict) and field in arm:
                return ("arms", name)
    return parts


def _mistake(path: str, line: int, field: str, problem: str) -> CommandError:
    return CommandError(f"{path}:{line}: {field + ': ' if field else ''}{problem}", Exit.USAGE)
