"""A directive file: roll-outs that are aborted on this machine, Kafka or not. It can only lower weights."""

from __future__ import annotations

import logging
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from schemas.control import Aborted, DirectiveFile
from schemas.plain import Log, Plain
from schemas.records import read_json

log: Log = logging.getLogger(__name__)

MAX_BYTES: Final = 1 << 20


class DirectiveFileError(Exception):
    """It cannot be read or holds something else; the message names file, fault and remedy."""


def read_directive_file(path: Path) -> DirectiveFile | None:
    """What it says; None where there is no such file. Raises DirectiveFileError. Reads a file: blocks."""
    remedy = "mend it, or remove it if nothing is aborted"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DirectiveFileError(f"{path}: is no regular file; name another one")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DirectiveFileError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None
    if len(content) > MAX_BYTES:
        raise DirectiveFileError(f"{path}: over {MAX_BYTES} bytes, so it is no directive file; {remedy}")
    try:
        return read_json(content, DirectiveFile)
    except msgspec.DecodeError as error:
        raise DirectiveFileError(f"{path}: no directive file: {error}; {remedy}") from None


class WatchedFile:
    """A directive file as a router sees it. While it cannot be read, what it said last stays in force."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problem = ""
        self._known: Mapping[str, Aborted] | None = None

    @property
    def aborted(self) -> Mapping[str, Aborted]:
        """Roll-outs that are aborted here."""
        return self._known or {}

    @property
    def unsure(self) -> bool:
        """It exists and was never readable since this process began: nobody knows what it says."""
        return self._known is None and bool(self._problem)

    def poll(self) -> None:
        """Look again; says once what is wrong with it, and what it newly says. Reads a file: blocks."""
        try:
            said = read_directive_file(self._path)
        except DirectiveFileError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                stays = "roll-outs stay at their last promoted split" if self.unsure else "what it said stays"
                log.error("%s; until then %s", Plain(error), Plain(stays))
            return
        if self._problem:
            log.warning("%s: readable again, or gone", Plain(self._path))
        self._problem = ""
        now = {} if said is None else said.aborted
        for name in now.keys() - self.aborted.keys():
            log.warning("%s: %s is aborted here by %s; this ends when the file no longer says so",
                        Plain(self._path), Plain(name), Plain(now[name].by))  # fmt: skip
        for name in self.aborted.keys() - now.keys():
            log.warning("%s: %s is no longer aborted here", Plain(self._path), Plain(name))
        self._known = now
