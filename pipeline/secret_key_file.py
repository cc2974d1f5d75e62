"""Secret keys of the gateway in files: what signatures, pseudonyms and texts are made with, and until when.

Text that a person can look at, for nobody but its owner to read; the key itself shows in no message. C1: a
key for texts is good for 90 days at most.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import yaml

from pipeline.errors import PipelineError
from pipeline.private_file import PrivateFiles
from pipeline.trust_file import time_text

KEY_BYTES: Final = 32
VERSION: Final = 1
DAY_US: Final = 86_400_000_000
MOST_DAYS: Final = 90
"""C1; of the other kinds the default."""
FIELDS: Final = ("v", "kind", "key_id", "created", "valid_until", "key")
HEAD: Final = "# A secret key, written by `klaxon keys`: for its owner alone to read. docs/security.md\n"
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_US: Final = datetime.timedelta(microseconds=1)


class KeyKind(StrEnum):
    """What a secret key is for. One key is for one thing."""

    SIGNATURE = "signature"
    """Prompt signatures, and hashes of sessions and tenants: equal on all gateways of a roll-out."""
    PSEUDONYM = "pseudonym"
    """Pseudonyms of tokens."""
    TEXT = "text"
    """Texts of users who consented."""


class SecretKeyError(PipelineError):
    """A secret key cannot be used or written; the message names file and remedy, never its content."""


FILES: Final = PrivateFiles("secret key", 1 << 14, SecretKeyError)


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key, and how long it may be used."""

    kind: KeyKind
    key: bytes = field(repr=False)
    created_us: int
    valid_until_us: int

    @property
    def key_id(self) -> str:
        """First 16 hex digits of HMAC-SHA-256 under the key of `klaxon key id/1`, a zero byte, the kind."""
        named = b"klaxon key id/1\0" + self.kind.value.encode()
        return hmac.digest(self.key, named, hashlib.sha256).hex()[:16]


def new_secret_key(kind: KeyKind, now_us: int, days: int) -> SecretKey:
    """A random one."""
    return SecretKey(kind, secrets.token_bytes(KEY_BYTES), now_us, now_us + days * DAY_US)


def read_secret_key(path: Path, kind: KeyKind) -> SecretKey:
    """The key in this file, which must be of this kind. Raises SecretKeyError. Blocks."""
    remedy = f"`klaxon keys create FOLDER --for {kind.value}` makes one"
    content = FILES.read(path, remedy)
    key = _parse(content, f"{path}: no secret key of Klaxon's; {remedy}")
    if key.kind is not kind:
        raise SecretKeyError(
            f"{path}: this key is for {key.kind.value}, not for {kind.value}; name the right file, {remedy}"
        )
    return key


def create_secret_key_file(path: Path, key: SecretKey) -> None:
    """Write it, mode 0600; never over an existing file. Raises SecretKeyError. Blocks."""
    FILES.create(path, _text(key).encode())


def _text(key: SecretKey) -> str:
    fields = {
        "v": VERSION,
        "kind": key.kind.value,
        "key_id": key.key_id,
        "created": time_text(key.created_us),
        "valid_until": time_text(key.valid_until_us),
        "key": base64.b64encode(key.key).decode(),
    }
    return HEAD + yaml.safe_dump(fields, sort_keys=False)


def _parse(content: bytes, problem: str) -> SecretKey:
    """Raises SecretKeyError with what is wrong; nothing that stands in the file is quoted."""
    try:
        fields = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise SecretKeyError(problem) from None
    if not isinstance(fields, dict) or set(fields) != set(FIELDS) or fields["v"] != VERSION:
        raise SecretKeyError(problem)
    try:
        key = base64.b64decode(fields["key"], validate=True)
        kind = KeyKind(fields["kind"])
        created_us, valid_until_us = _time_us(fields["created"]), _time_us(fields["valid_until"])
    except (binascii.Error, ValueError, TypeError):
        raise SecretKeyError(problem) from None
    found = SecretKey(kind, key, created_us, valid_until_us)
    if len(key) != KEY_BYTES or not hmac.compare_digest(found.key_id, str(fields["key_id"])):
        raise SecretKeyError(problem)
    if kind is KeyKind.TEXT and valid_until_us > created_us + MOST_DAYS * DAY_US:
        raise SecretKeyError(
            f"{problem.partition(':')[0]}: a key for texts is valid for {MOST_DAYS} days at most (C1); "
            "make another one with `klaxon keys rotate text`"
        )
    return found


def _time_us(given: object) -> int:
    time = datetime.datetime.fromisoformat(given) if isinstance(given, str) else given
    if not isinstance(time, datetime.datetime):
        raise TypeError("no time")
    return (time.replace(tzinfo=time.tzinfo or datetime.UTC) - _EPOCH) // _US
