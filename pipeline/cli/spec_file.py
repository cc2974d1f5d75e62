"""Roll-out specs as people write them: YAML, and messages that name file, line and field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from pipeline.cli.exits import CommandError, Exit
from pipeline.core.gate.versions import SpecError, check_spec
from pipeline.core.spelling import nearest
from pipeline.policy_file import PolicyError, parse_policy, read_policy_file
from pipeline.yaml_lines import Document, YamlError, parse
from schemas.control import ArmSpec, RolloutSpec
from schemas.events import ARMS

_UNKNOWN: Final = re.compile(r"unknown field `(.+?)`")
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
        raise _explain_arm(path, document) or _explain(path, document, str(error)) from None
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


def _explain_arm(path: str, document: Document) -> CommandError | None:
    """The first mistake inside an arm: what msgspec says of a whole spec does not tell which arm it means."""
    arms = document.data.get("arms") if isinstance(document.data, dict) else None
    for name, arm in arms.items() if isinstance(arms, dict) else ():
        if name not in ARMS:
            problem = f"unknown arm {name!r}{nearest(name, ARMS)}"
            return _mistake(path, document.line_of(("arms", name)), "arms", problem)
        try:
            msgspec.convert(arm, ArmSpec)
        except msgspec.ValidationError as error:
            return _explain(path, document, str(error), ("arms", name), ArmSpec.__struct_fields__)
    return None


def _explain(
    path: str,
    document: Document,
    message: str,
    within: tuple[str | int, ...] = (),
    known: tuple[str, ...] = RolloutSpec.__struct_fields__,
) -> CommandError:
    what, _, at = message.partition(" - at `")
    parts = within + tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]$`]+", at))
    if found := _UNKNOWN.search(what):
        parts, what = (*parts, found[1]), f"unknown field {found[1]!r}{nearest(found[1], known)}"
    elif found := _MISSING.search(what):
        parts = (*parts, found[1])
    return _mistake(path, document.line_of(parts), ".".join(str(part) for part in parts), what)


def _mistake(path: str, line: int, field: str, problem: str) -> CommandError:
    return CommandError(f"{path}:{line}: {field + ': ' if field else ''}{problem}", Exit.USAGE)
