"""What an engine says went wrong, as the classes of the events' `error`. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypeAlias

Failure: TypeAlias = Literal["oom", "overload", "timeout", "refused", "engine"]

_MEMORY: Final = re.compile(
    r"out of memory|\boom\b|failed to find a memory slot|insufficient memory", re.IGNORECASE
)
_OVERLOAD: Final = re.compile(r"overload|too many|queue is full|no available slot|rate.?limit", re.IGNORECASE)
_TIMEOUT: Final = re.compile(r"timed? ?out", re.IGNORECASE)
_TIMEOUTS: Final = (408, 504)
_OVERLOADS: Final = (429, 503, 529)
_REFUSALS: Final = range(400, 500)
_MOST_TEXT: Final = 4096


def says_out_of_memory(text: str) -> bool:
    """Whether an engine's words mean that its memory did not suffice."""
    return _MEMORY.search(text) is not None


def failure_class(said: Any) -> Failure:
    """The class of an `error` object, its text, or a `detail`.

    Out of memory comes first, whatever the code: it is what a gate must know. `refused`: the engine took the
    request for wrong; `engine`: it failed, and says nothing closer.
    """
    text, code = "", None
    if isinstance(said, dict):
        code = said.get("code")
        text = " ".join(str(said.get(name) or "")[:_MOST_TEXT] for name in ("message", "type", "object"))
    elif isinstance(said, str):
        text = said[:_MOST_TEXT]
    if _MEMORY.search(text):
        return "oom"
    if code in _TIMEOUTS or _TIMEOUT.search(text):
        return "timeout"
    if code in _OVERLOADS or _OVERLOAD.search(text):
        return "overload"
    if (type(code) is int and code in _REFUSALS) or "BadRequest" in text or "invalid_request" in text:
        return "refused"
    return "refused" if isinstance(said, list) or text in ("Not Found", "Method Not Allowed") else "engine"
