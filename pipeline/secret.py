"""Credentials that show themselves to nobody by accident: not in a repr, a log line, a dump or an error."""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Final, NoReturn

from pipeline.errors import PipelineError

MAX_BYTES: Final = 64 << 10
"""Of a file that holds one: whatever is larger was named by mistake."""


class SecretFileError(PipelineError):
    """A file that should hold a secret does not; the message says why, never what it holds."""


class Secret:
    """Text that only `reveal` gives away; empty means none. Serialisers refuse it."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself: for the call that needs it, and for no variable that lives longer."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(("Secret", self._text))

    def __repr__(self) -> str:
        return "Secret(***)" if self._text else "Secret()"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not serialised")


def without_password(address: str) -> str:
    """The address as a message may hold it, however wrong it is."""
    hidden = re.sub(r"(://[^:/@]*:).*@", r"\1***@", address)
    return re.sub(r"(?i)([?&][^=&]*(?:password|token|secret)[^=&]*=)[^&#]*", r"\1***", hidden)


def read_secret_file(path: str) -> Secret:
    """The text of a file without the line end that editors put there; raises SecretFileError. Blocks."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SecretFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        text = data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise SecretFileError(f"{path} is not UTF-8 text") from None
    if len(data) > MAX_BYTES or "\n" in text:
        raise SecretFileError(f"{path} holds more than one line, which no password does")
    if not text:
        raise SecretFileError(f"{path} is empty")
    return Secret(text)
