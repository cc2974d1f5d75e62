"""YAML as plain data that still knows on which line each value stood, for messages a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import yaml

Path: TypeAlias = tuple[str | int, ...]


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
        raise YamlError(error.problem or "not YAML", mark.line + 1 if mark else 1) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error), 1) from None
    lines: dict[Path, int] = {(): 1}
    if node is None:
        return Document({}, lines)
    loader = yaml.SafeLoader("")
    try:
        return Document(_plain(loader, node, (), lines), lines)
    finally:
        loader.dispose()


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: Path, lines: dict[Path, int]) -> object:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node))
            if key in mapping:
                raise YamlError(f"{key!r} stands twice", key_node.start_mark.line + 1)
            mapping[key] = _plain(loader, value_node, (*path, key), lines)
            lines[(*path, key)] = key_node.start_mark.line + 1
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*path, at), lines) for at, item in enumerate(node.value)]
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error).splitlines()[0], node.start_mark.line + 1) from None
