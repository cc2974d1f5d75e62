"""YAML as plain data that still knows on which line each value stood, for messages a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import yaml

Path: TypeAlias = tuple[str | int, ...]

MOST_DEPTH: Final = 50
"""Levels inside each other; a policy has four."""
MOST_VALUES: Final = 100_000
"""Values in all, each alias counted with what it stands for: a few lines can spell out billions."""
MOST_BITS: Final = 64
"""Of a whole number. Arithmetic on a longer one, or printing it, may take forever or fail."""


class YamlError(Exception):
    """The text is no YAML, or a mapping names a key twice. `line` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """`data` is what a YAML reader gives; `lines` maps the path of every value to its line, from 1."""

    data: object
    lines: Mapping[Path, int]

    def line_of(self, path: Path) -> int:
        """Line of the value at `path`, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse(text: str) -> Document:
    """Read one document. Raises YamlError; never constructs anything but plain data."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "not YAML"
        if isinstance(error, yaml.composer.ComposerError) and ("alias" in problem or "anchor" in problem):
            problem = "an alias or anchor that does not fit; put text that begins with * or & in quotes"
        raise YamlError(problem, mark.line + 1 if mark else 1) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error), 1) from None
    except RecursionError:
        raise YamlError(f"more than {MOST_DEPTH} levels inside each other", 1) from None
    lines: dict[Path, int] = {(): 1}
    if node is None:
        return Document({}, lines)
    loader = yaml.SafeLoader("")
    try:
        return Document(_plain(loader, node, (), lines), lines)
    finally:
        loader.dispose()


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: Path, lines: dict[Path, int]) -> object:
    line = node.start_mark.line + 1
    if len(path) > MOST_DEPTH:
        raise YamlError(f"more than {MOST_DEPTH} levels inside each other", line)
    if len(lines) > MOST_VALUES:
        raise YamlError(f"more than {MOST_VALUES} values, aliases spelled out", line)
    lines[path] = line
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key, key_line = _key(loader, key_node), key_node.start_mark.line + 1
            if key in mapping:
                raise YamlError(f"{key!r} stands twice", key_line)
            mapping[key] = _plain(loader, value_node, (*path, key), lines)
            lines[(*path, key)] = key_line
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*path, at), lines) for at, item in enumerate(node.value)]
    return _scalar(loader, node)


def _key(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise YamlError("a list or mapping stands where a key is expected", node.start_mark.line + 1)
    if node.tag == "tag:yaml.org,2002:merge":
        raise YamlError("'<<' merges nothing here; write the keys out", node.start_mark.line + 1)
    return str(_scalar(loader, node))


def _scalar(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    line = node.start_mark.line + 1
    try:
        value: object = loader.construct_object(node)
        if isinstance(value, str):
            value.encode()  # an escape may spell half a character, which nothing could send on
            if "\0" in value:
                raise ValueError("text holds a NUL character")
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError) as error:
        raise YamlError(_fault(node, error), line) from None
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise YamlError(f"a whole number of more than {MOST_BITS} bits", line)
    return value


def _fault(node: yaml.Node, error: Exception) -> str:
    """What is wrong with a scalar. Never its text: it may be a password that was not put in quotes."""
    said = (str(error).splitlines() or [""])[0]
    if not isinstance(error, ValueError | OverflowError) or str(node.value) in said:
        return "a tag that does not fit; put text that begins with ! in quotes"
    return said
