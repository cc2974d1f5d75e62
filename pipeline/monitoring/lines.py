"""What processes say in their logs: one line per event, for people or as JSON; redacted by structure.

Which values may stand in a line is decided by their type, not by what they look like: numbers, enums, our
own types, `Plain` text and errors of known kinds. Anything else, a `str` above all, is replaced by its type's
name. So what an event, a header or a key holds cannot enter a log by accident. An error of another kind is
named with the place where it rose, without its message, which may quote data.

Of other packages' loggers, whose arguments are not ours to type, the first line is kept, without what errors
say.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from types import TracebackType
from typing import Any, Final

from pipeline.config import LoggingConfig
from pipeline.core.visible import visible
from pipeline.errors import PipelineError
from schemas.errors import SchemaError
from schemas.plain import Plain, PlainJson

HUMAN: Final = "%(asctime)s %(levelname)s %(name)s: "
OURS: Final = ("klaxon", "agents")
MOST_CAUSES: Final = 4
"""Errors behind an error that are named."""
MOST_CHARS: Final = 4_000
"""Of one argument; gauges (PlainJson) are whole."""

_SAYING: Final = (PipelineError, SchemaError, OSError)
"""Errors whose own words may stand in a log, besides those that `set_up` is given."""


class Lines(logging.Formatter):
    """Formats records of any logger. `typed`: further types and errors that speak for themselves."""

    def __init__(self, process: str, *, as_json: bool, typed: tuple[type, ...] = ()) -> None:
        super().__init__(HUMAN)
        self._process = process
        self._as_json = as_json
        self._saying = tuple(kind for kind in typed if issubclass(kind, BaseException)) + _SAYING
        self._typed = tuple(kind for kind in typed if not issubclass(kind, BaseException))

    def format(self, record: logging.LogRecord) -> str:
        ours = record.name.partition(".")[0] in OURS
        arguments = self._arguments(record, ours=ours)
        try:
            message = str(record.msg) % arguments if arguments else str(record.msg)
        except (TypeError, ValueError):
            message = str(record.msg)
        message = message.replace("\r", " ").replace("\n", " ") if ours else message.partition("\n")[0]
        message = visible(message)
        error = record.exc_info[1] if record.exc_info else None
        return (self._json if self._as_json else self._human)(record, message, arguments, error)

    def _human(
        self, record: logging.LogRecord, message: str, _arguments: object, error: BaseException | None
    ) -> str:
        record.asctime = self.formatTime(record)
        line = HUMAN % record.__dict__ + message
        if error is None:
            return line
        return "\n".join([line, *(self._chain(error))])

    def _json(
        self,
        record: logging.LogRecord,
        message: str,
        arguments: tuple[Any, ...] | Mapping[str, Any],
        error: BaseException | None,
    ) -> str:
        values = arguments.values() if isinstance(arguments, Mapping) else arguments
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "event": str(record.msg).partition("\n")[0],
            "message": message,
            "arguments": [_json_value(value) for value in values],
        }
        if error is not None:
            said["error"] = "\n".join(self._chain(error))
        return json.dumps(said, ensure_ascii=False)

    def _arguments(self, record: logging.LogRecord, *, ours: bool) -> tuple[Any, ...] | Mapping[str, Any]:
        arguments = record.args
        if not arguments:
            return ()
        may = self._ours if ours else self._theirs
        if isinstance(arguments, Mapping):
            if "%(" not in str(record.msg):  # logging unpacks a dictionary that is the only argument
                return (may(arguments),)
            return {name: may(value) for name, value in arguments.items()}
        return tuple(may(value) for value in arguments)

    def _ours(self, value: object) -> object:
        if value is None or isinstance(value, int | float | PlainJson):
            return value
        if isinstance(value, Enum):
            return _Said(str(value.value))
        if isinstance(value, self._saying):
            return _Said(self._words(value))
        if isinstance(value, (Plain, *self._typed)):
            return _Said(str(value)[:MOST_CHARS])
        return _Said(f"[{type(value).__name__} withheld]")

    def _theirs(self, value: object) -> object:
        if isinstance(value, BaseException) and not isinstance(value, self._saying):
            return _Said(type(value).__name__)
        if isinstance(value, bytes | bytearray | memoryview):
            return _Said(f"[{len(value)} bytes withheld]")
        return value

    def _words(self, error: BaseException) -> str:
        """What an error says, where its kind may; else its name."""
        if not isinstance(error, self._saying):
            return f"{type(error).__name__} (its message is withheld: it may quote data)"
        said = str(error)
        return said if isinstance(error, PipelineError | SchemaError) else f"{type(error).__name__}: {said}"

    def _chain(self, error: BaseException) -> list[str]:
        """Where errors rose, the first cause first, as a traceback without source and without words."""
        errors: list[BaseException] = []
        at: BaseException | None = error
        while at is not None and len(errors) <= MOST_CAUSES:
            errors.insert(0, at)
            at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
        lines = ["Traceback (most recent call last):"]
        for each in errors:
            for frame in traceback.extract_tb(each.__traceback__):
                lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
            lines.append(f"{type(each).__module__}.{type(each).__name__}: {self._words(each)}")
        return lines


class _Said(Plain):
    """What stands for an argument, quoted nowhere: `%r` gives it as `%s` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _json_value(value: object) -> object:
    if isinstance(value, PlainJson):
        return json.loads(value)
    if value is None or isinstance(value, int | float | str):
        return value
    return repr(value)[:MOST_CHARS]


def set_up(process: str, config: LoggingConfig, typed: tuple[type, ...] = ()) -> None:
    """Log to standard error: ours from INFO up, everybody else's from WARNING up; errors nobody caught, too.

    Replaces what was set up before.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(process, as_json=config.format == "json", typed=typed))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for ours in OURS:
        logging.getLogger(ours).setLevel(logging.INFO)

    def uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error or kind(), trace)
            return
        logging.getLogger("klaxon").critical("ended by an error", exc_info=(kind, error, trace))

    sys.excepthook = uncaught
    threading.excepthook = lambda one: uncaught(one.exc_type, one.exc_value, one.exc_traceback)
