"""The keys that the processes of a test sign and verify with: made once for a run, gone after it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Final

from pipeline.key_file import create_key_file, read_key_file
from pipeline.trust_file import Entry, WatchedTrust, trust_text
from schemas.signing import Signer, TrustedKey, Use
from schemas.topics import Topic

ENDED: Final = Signer(bytes(range(32)))
"""Trusted until a second after the epoch."""
STRANGER: Final = Signer(bytes(range(1, 33)))
"""Trusted by nobody."""


@functools.cache
def _held() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="klaxon-keys-")
    make_keys(Path(folder.name))
    return folder


def make_keys(folder: Path) -> None:
    """A key for directives, one for commands, and the trust file that holds both."""
    entries = {}
    for use in Use:
        signer = create_key_file(folder / f"{use.value}.key")
        entries[signer.key_id] = Entry(TrustedKey(signer.public_key, frozenset({use})))
    ended = TrustedKey(ENDED.public_key, frozenset(Use), valid_until_us=1_000_000)
    entries[ENDED.key_id] = Entry(ended, "its validity is over")
    (folder / "trust.yaml").write_text(trust_text(entries))


def settings(folder: Path | None = None) -> dict[str, str]:
    """Variables that make a process sign and verify with the keys in this folder, or with the run's."""
    folder = folder or Path(_held().name)
    return {
        "KLAXON_SIGNATURES_TRUST_FILE": str(folder / "trust.yaml"),
        "KLAXON_SIGNATURES_DIRECTIVE_KEY_FILE": str(folder / "directives.key"),
        "KLAXON_SIGNATURES_COMMAND_KEY_FILE": str(folder / "commands.key"),
    }


@functools.cache
def signer(use: Use) -> Signer:
    """One of the run's keys."""
    return read_key_file(Path(_held().name) / f"{use.value}.key")


def trusted() -> WatchedTrust:
    """The run's trust file."""
    return WatchedTrust(Path(settings()["KLAXON_SIGNATURES_TRUST_FILE"]))


def command_header(key: bytes | None, value: bytes) -> tuple[str, bytes]:
    """The header that signs a command."""
    return signer(Use.COMMANDS).header(Topic.COMMANDS.value, key, value)


def directive_header(key: bytes | None, value: bytes) -> tuple[str, bytes]:
    """The header that signs a directive, as a gate does."""
    return signer(Use.DIRECTIVES).header(Topic.CONTROL.value, key, value)
