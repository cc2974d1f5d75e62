"""Captures on disk: a JSONL file of responses, or a folder of bodies. Mistakes name file and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pipeline.cli.exits import CommandError, Exit
from pipeline.core.captures.comparison import Captured
from schemas.answers.bodies import read_body, read_response
from schemas.answers.positions import CaptureError
from schemas.answers.shapes import read_json
from schemas.columns import DEFINITIONS, SOURCES

_BODIES: Final = (".sse", ".json")
_BESIDE: Final = (".meta.json", ".request.json")
"""Written by capture tools beside the bodies: not bodies."""


def load_capture(path: Path) -> list[Captured]:
    """Every answer of one side, in the file's or the names' order. Raises CommandError for bad input."""
    try:
        return list(_folder(path) if path.is_dir() else _jsonl(path))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}", Exit.USAGE) from None


def _folder(folder: Path) -> Iterator[Captured]:
    bodies = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix in _BODIES and not file.name.endswith(_BESIDE)
    )
    if not bodies:
        raise CommandError(f"{folder}: no NAME.sse or NAME.json in this folder", Exit.USAGE)
    seen: dict[str, Path] = {}
    for file in bodies:
        first = seen.setdefault(file.stem, file)
        if first is not file:
            raise CommandError(
                f"{file}: {first.name} has the same name; bodies are paired by it, rename one", Exit.USAGE
            )
        try:
            yield Captured(file.stem, read_body(file.read_bytes()))
        except CaptureError as error:
            place = f"{file}:{error.line}" if error.line else str(file)
            raise CommandError(f"{place}: {error}", Exit.USAGE) from None


def _jsonl(file: Path) -> Iterator[Captured]:
    first_line: dict[str | None, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                captured = _record(read_json(line.decode("utf-8-sig")))
            except UnicodeDecodeError:
                mistake = "not UTF-8 text"
            except CaptureError as error:
                mistake = f"{error}; one response a line is expected" if error.line else str(error)
            else:
                mistake = _unpairable(captured.key, first_line)
            if mistake:
                raise CommandError(f"{file}:{number}: {mistake}", Exit.USAGE)
            first_line.setdefault(captured.key, number)
            yield captured


def _unpairable(key: str | None, first_line: Mapping[str | None, int]) -> str:
    """What is wrong with this prompt_id among the earlier ones; empty: nothing."""
    if key is not None and key in first_line:
        return f"prompt_id {key!r} stands on line {first_line[key]} already; answers are paired by it"
    if first_line and (key is None) != (None in first_line):
        missing = "no prompt_id here, but" if key is None else "a prompt_id here, but none"
        return f"{missing} on line {next(iter(first_line.values()))}; give one to every answer, or to none"
    return ""


def _record(record: object) -> Captured:
    """One line: a response with its prompt_id, or one wrapped as {"prompt_id", "response"}."""
    if not isinstance(record, Mapping):
        raise CaptureError("not an object; expected a response or {prompt_id, response}")
    response = record.get("response", record)
    if not isinstance(response, Mapping):
        raise CaptureError("response: not an object")
    if not {"choices", "error", "detail"} & response.keys():
        raise CaptureError("no `choices`: expected a chat.completion or text_completion object")
    return Captured(
        _prompt_id(record.get("prompt_id", response.get("prompt_id"))),
        read_response(response),
        forced=_code(record, "source", SOURCES) == SOURCES.index("forced"),
        definition=_code(record, "definition", DEFINITIONS),
    )


def _prompt_id(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise CaptureError(f"prompt_id is {str(value)[:60]!r}, neither text nor a whole number")


def _code(record: Mapping[str, Any], field: str, values: tuple[str, ...]) -> int:
    """Code of an optional field; the first value is the default."""
    value = record.get(field, values[0])
    if value not in values:
        raise CaptureError(f"{field} is {str(value)[:60]!r}; expected one of {', '.join(values)}")
    return values.index(value)
