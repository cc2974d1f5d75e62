"""Exit codes of every command, and the error that carries one."""

from __future__ import annotations

import json
from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit code means; the same for all commands."""

    OK = 0
    """Done; where a judgement was asked for, it passes."""
    BAD = 1
    """The judgement is bad: diverged, tripped unexpectedly, verification failed."""
    USAGE = 2
    """Wrong usage, configuration, policy or input."""
    UNREACHABLE = 3
    """A service could not be reached in time."""
    NOT_ENOUGH_DATA = 4
    """Not enough data to judge."""


def error_json(message: str) -> str:
    """What a command with --json prints where it would print its result: what is wrong and what to do.

    Messages end with the remedy, after their last semicolon; `remedy` is null where the whole text says both.
    """
    error, _, remedy = message.rpartition("; ")
    return json.dumps({"error": error or remedy, "remedy": remedy if error else None})


class CommandError(Exception):
    """A command ends here. The message names the thing, the place and the remedy."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit_code = exit_code
