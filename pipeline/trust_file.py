"""Trust files: which keys a process trusts, for what, until when. YAML, and messages a person can act on."""

from __future__ import annotations

import base64
import binascii
import datetime
import logging
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from pipeline.core.spelling import nearest
from pipeline.errors import PipelineError
from pipeline.file_version import LOOK_EVERY_S, file_version
from pipeline.yaml_lines import Document, YamlError, parse
from pipeline.yaml_lines import Path as Place
from schemas.plain import Log, Plain
from schemas.signing import PUBLIC_KEY_BYTES, Trust, TrustedKey, Use, Verdict, key_id
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.signatures")

MAX_BYTES: Final = 1 << 20
VERSION: Final = 1
FIELDS: Final = ("public_key", "signs", "valid_from", "valid_until", "note")
HEAD: Final = """\
# Keys that Klaxon trusts, written by `klaxon keys`; processes read it again while they run.
# Taking a key out revokes it at once. docs/security.md
"""
_UTC: Final = datetime.UTC
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=_UTC)
_US: Final = datetime.timedelta(microseconds=1)


class TrustFileError(PipelineError):
    """It cannot be used; the message names file, line, key and remedy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it stands in a trust file."""

    key: TrustedKey
    note: str = ""


def parse_trust(text: str, name: str) -> dict[str, Entry]:
    """The keys in this text, by id; `name` stands in messages. Raises TrustFileError. Pure."""
    try:
        document = parse(text)
    except YamlError as error:
        raise TrustFileError(f"{name}:{error.line}: {error}; mend the YAML there") from None
    return _Reading(document, name).entries()


def read_trust_file(path: Path) -> dict[str, Entry]:
    """The keys in this file, by id. Raises TrustFileError. Blocks."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TrustFileError(f"{path}: is no regular file; name another one")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TrustFileError(
            f"{path}: cannot be read: {error.strerror}; `klaxon keys create` makes one"
        ) from None
    if len(content) > MAX_BYTES:
        raise TrustFileError(f"{path}: over {MAX_BYTES} bytes, so it is no trust file; name another one")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise TrustFileError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    return parse_trust(text, str(path))


def trust_of(entries: Mapping[str, Entry]) -> Trust:
    """What a reader goes by."""
    return Trust({name: entry.key for name, entry in entries.items()})


def trust_text(entries: Mapping[str, Entry]) -> str:
    """The file that holds these keys."""
    keys: dict[str, dict[str, object]] = {}
    for name, entry in entries.items():
        key = entry.key
        keys[name] = {
            "public_key": base64.b64encode(key.public_key).decode(),
            "signs": sorted(use.value for use in key.signs),
            "valid_from": time_text(key.valid_from_us),
        }
        if key.valid_until_us is not None:
            keys[name]["valid_until"] = time_text(key.valid_until_us)
        if entry.note:
            keys[name]["note"] = entry.note
    body = yaml.safe_dump({"v": VERSION, "keys": keys}, sort_keys=False, default_flow_style=None, width=200)
    return HEAD + body


def time_text(time_us: int) -> str:
    """A time as it stands in a trust file, in whole seconds."""
    return (_EPOCH + datetime.timedelta(seconds=time_us // 1_000_000)).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Reading:
    """One document on its way to entries."""

    def __init__(self, document: Document, name: str) -> None:
        self._document = document
        self._name = name

    def entries(self) -> dict[str, Entry]:
        data = self._document.data
        if not isinstance(data, dict) or "keys" not in data:
            raise self._wrong((), "no trust file; `v: 1` and `keys:` are expected; see `klaxon keys create`")
        for field in data:
            if field not in ("v", "keys"):
                raise self._wrong((field,), f"unknown{nearest(field, ('v', 'keys'))}")
        if data.get("v") != VERSION or data["v"] is True:
            raise self._wrong(("v",), f"this Klaxon reads version {VERSION}; write `v: {VERSION}`")
        keys = data["keys"]
        if not isinstance(keys, dict):
            raise self._wrong(("keys",), "key ids are expected, each with its public_key and what it signs")
        return {name: self._entry(name, content) for name, content in keys.items()}

    def _entry(self, name: str, content: object) -> Entry:
        at: Place = ("keys", name)
        if not isinstance(content, dict):
            raise self._wrong(at, f"holds {', '.join(FIELDS)}, one a line")
        for field in content:
            if field not in FIELDS:
                raise self._wrong((*at, field), f"unknown{nearest(field, FIELDS)}")
        public_key = self._public_key(at, content)
        if (right := key_id(public_key)) != name:
            raise self._wrong(at, f"this public key's id is {right!r}; write that, in quotes")
        valid_from = self._time((*at, "valid_from"), content.get("valid_from"))
        valid_until = self._time((*at, "valid_until"), content.get("valid_until"))
        if valid_until is not None and valid_until < (valid_from or 0):
            raise self._wrong((*at, "valid_until"), "lies before valid_from; exchange them")
        note = content.get("note", "")
        if not isinstance(note, str):
            raise self._wrong((*at, "note"), "text is expected; put it in quotes")
        return Entry(TrustedKey(public_key, self._signs(at, content), valid_from or 0, valid_until), note)

    def _public_key(self, at: Place, content: Mapping[str, object]) -> bytes:
        given = content.get("public_key")
        at = (*at, "public_key")
        remedy = f"base64 of the {PUBLIC_KEY_BYTES} bytes of an Ed25519 public key is expected"
        if not isinstance(given, str):
            raise self._wrong(at, remedy)
        try:
            public_key = base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError):
            raise self._wrong(at, f"no base64; {remedy}") from None
        if len(public_key) != PUBLIC_KEY_BYTES:
            raise self._wrong(at, f"{len(public_key)} bytes; {remedy}")
        return public_key

    def _signs(self, at: Place, content: Mapping[str, object]) -> frozenset[Use]:
        given = content.get("signs")
        at = (*at, "signs")
        known = ", ".join(use.value for use in Use)
        if not isinstance(given, list) or not given:
            raise self._wrong(at, f"a list of what it may sign is expected: [{known}]")
        signs = set()
        for position, one in enumerate(given):
            try:
                signs.add(Use(one))
            except ValueError:
                raise self._wrong((*at, position), f"nothing is called {one!r}; known: {known}") from None
        return frozenset(signs)

    def _time(self, at: Place, given: object) -> int | None:
        if given is None:
            return None
        try:
            time = datetime.datetime.fromisoformat(given) if isinstance(given, str) else given
        except ValueError:
            time = None
        if not isinstance(time, datetime.datetime) or time.tzinfo is None:
            raise self._wrong(at, "a time with its zone is expected, such as 2027-01-31T00:00:00Z")
        return (time - _EPOCH) // _US

    def _wrong(self, at: Place, problem: str) -> TrustFileError:
        field = ".".join(str(part) for part in at if not isinstance(part, int))
        line = self._document.line_of(at)
        return TrustFileError(f"{self._name}:{line}: {field + ': ' if field else ''}{problem}")


class WatchedTrust:
    """A trust file as a running process sees it. While a change cannot be read, what it said last holds."""

    def __init__(self, path: Path) -> None:
        """Reads the file: blocks; raises TrustFileError."""
        self._path = path
        self._seen = file_version(path)
        self._trust = trust_of(read_trust_file(path))
        self._looked_s = 0.0

    @property
    def trust(self) -> Trust:
        """What holds now."""
        return self._trust

    def check(
        self, topic: Topic, key: bytes | None, value: bytes | None, header: bytes | None, now_us: int
    ) -> Verdict:
        """As Trust.check."""
        return self._trust.check(topic, key, value, header, now_us)

    def poll(self, now_s: float) -> None:
        """Read the file again if it is another one, at most every LOOK_EVERY_S of this monotonic time.

        Says what changed, once. A look is one `stat`; reading blocks.
        """
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        seen = file_version(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            trust = trust_of(read_trust_file(self._path))
        except TrustFileError as error:
            log.error("%s; until then the keys that it held before stay trusted", error)
            return
        added, gone = trust.keys.keys() - self._trust.keys.keys(), self._trust.keys.keys() - trust.keys.keys()
        self._trust = trust
        new, old = (Plain(", ".join(sorted(ids)) or "none") for ids in (added, gone))
        path, held = Plain(self._path), len(trust.keys)
        log.warning("%s: read again: %d keys; new: %s; gone: %s", path, held, new, old)
