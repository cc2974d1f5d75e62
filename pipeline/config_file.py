"""The configuration's file and variables as plain values, and where in them a mistake stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pipeline.core.spelling import nearest
from pipeline.errors import PipelineError
from pipeline.gateway_config import named, unknown_key, variables
from pipeline.yaml_lines import Document, YamlError, parse

PREFIX: Final = "KLAXON_"
NOT_CONFIGURATION: Final = frozenset({"KLAXON_CONFIG", "KLAXON_SHARED", "KLAXON_FAULT"})
"""Variables of ours that configure nothing: where the file is, the tests' data, a fault to inject."""


class ConfigError(PipelineError):
    """The configuration is wrong; the message names file and line, or variable, and the remedy."""


def read_file(
    path: str | None, sections: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, dict[str, object]], Document]:
    """Section → key → value, and the document for lines. `sections`: their known keys. Raises ConfigError."""
    if path is None:
        return {}, Document({}, {})
    try:
        document = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"configuration {path}: cannot be read: {error.strerror}; name another file with --config"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration {path}: not UTF-8 text; save it as UTF-8") from None
    except YamlError as error:
        raise ConfigError(f"{path}:{error.line}: {error}; mend the YAML there") from None
    if not isinstance(document.data, dict):
        raise ConfigError(f"{path}:1: a mapping of sections is expected: {', '.join(sections)}")
    values: dict[str, dict[str, object]] = {}
    for section, content in document.data.items():
        line = document.line_of((section,))
        if section not in sections:
            raise ConfigError(f"{path}:{line}: unknown section {section!r}{nearest(section, sections)}")
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}:{line}: {section} holds keys, one a line: {', '.join(sections[section])}"
            )
        for key in content:
            if key not in sections[section]:
                line = document.line_of((section, key))
                raise ConfigError(
                    f"{path}:{line}: unknown key {section}.{key}{nearest(key, sections[section])}"
                )
        if section == "gateway" and (unknown := unknown_key(content)) is not None:
            at, known = unknown
            line = document.line_of((section, *at))
            told = f"unknown key {named((section, *at))}{nearest(str(at[-1]), known)}"
            raise ConfigError(f"{path}:{line}: {told}")
        values[section] = dict(content)
    return values, document


def overlay(
    values: dict[str, dict[str, object]],
    environ: Mapping[str, str],
    sections: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """Put the variables over the file's values; returns path → variable for messages."""
    paths = [(section, key) for section, keys in sections.items() if section != "gateway" for key in keys]
    nested = [(("gateway", *path), is_list) for path, is_list in variables()]
    known = {PREFIX + "_".join(path).upper(): path for path in (*paths, *(path for path, _ in nested))}
    lists = {path for path, is_list in nested if is_list}
    used: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_CONFIGURATION:
            continue
        if variable not in known:
            raise ConfigError(f"unknown variable {variable}{nearest(variable, known)}")
        path = known[variable]
        if path in lists:
            raise ConfigError(f"variable {variable}: a list stands in the file only, as {'.'.join(path)}")
        holder: object = values
        for part in path[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else None
        if isinstance(holder, dict):  # else the file has no mapping there, which is told as its mistake
            holder[path[-1]] = value
        used[f"$.{'.'.join(path)}"] = variable
    return used


def place_of(message: str, path: str | None, document: Document, from_environment: Mapping[str, str]) -> str:
    """A message that ends with its path, as msgspec's do, with file and line, or variable, before it."""
    what, _, at = message.partition(" - at `")
    at = at.rstrip("`")
    if at in from_environment:
        return f"variable {from_environment[at]}: {what}"
    name = at.removeprefix("$.")
    parts = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", name)]
    place = "configuration" if path is None else f"{path}:{document.line_of(tuple(parts))}"
    return f"{place}: {name}: {what}"
