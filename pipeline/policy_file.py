"""Policies as people write them: YAML, and messages that name file, line, field and remedy."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path as FilePath

from pipeline.core.gate.policy import Policy
from pipeline.core.gate.policy_reading import read_policy
from pipeline.core.gate.policy_values import Path, PolicyMistake
from pipeline.errors import PipelineError
from pipeline.yaml_lines import YamlError, parse


class PolicyError(PipelineError):
    """A policy cannot be obeyed. `name` and `line` say where (0: the file itself); the message holds all
    and the remedy."""

    def __init__(self, name: str, line: int, field: str, problem: str) -> None:
        place = f"{name}:{line}" if line else name
        super().__init__(f"{place}: {field + ': ' if field else ''}{problem}")
        self.name = name
        self.line = line
        self.field = field


def policy_hash(text: str) -> str:
    """SHA-256 of the text, hex: what directives and roll-outs carry."""
    return hashlib.sha256(text.encode()).hexdigest()


def parse_policy(text: str, name: str = "policy") -> Policy:
    """The policy this text states; `name` stands in messages. Raises PolicyError. Pure."""
    try:
        document = parse(text)
    except YamlError as error:
        raise PolicyError(name, error.line, "", f"{error}; mend the YAML there") from None
    try:
        return read_policy(document.data, text, policy_hash(text))
    except PolicyMistake as mistake:
        line = document.line_of(mistake.path)
        raise PolicyError(name, line, _field(mistake.path, document.data), str(mistake)) from None


def read_policy_file(path: str) -> Policy:
    """The policy in this file. Raises PolicyError. Blocks."""
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(path, 0, "", f"cannot be read: {error.strerror}; name another file") from None
    except UnicodeDecodeError:
        raise PolicyError(path, 0, "", "not UTF-8 text; save it as UTF-8") from None
    return parse_policy(text, path)


def shipped_policy_text() -> str:
    """The text of the policy that holds where a roll-out brings none. Blocks."""
    return resources.files("pipeline.policies").joinpath("default.yaml").read_text(encoding="utf-8")


def _field(path: Path, data: object) -> str:
    """`rules[0].window of 'G3'`: the path as people read it, with the rule's id where it has one."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    if len(path) >= 2 and path[0] == "rules" and isinstance(data, dict):
        rule = data["rules"][path[1]]
        if isinstance(rule, dict) and isinstance(rule.get("id"), str):
            text += f" (rule {rule['id']!r})"
    return text
