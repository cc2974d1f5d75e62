"""`klaxon keys create|rotate` for the gateway's secret keys: signatures, pseudonyms, texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.cli.exits import CommandError, Exit
from pipeline.config import Config
from pipeline.secret_key_file import (
    MOST_DAYS,
    KeyKind,
    SecretKey,
    SecretKeyError,
    create_secret_key_file,
    new_secret_key,
    read_secret_key,
)
from pipeline.trust_file import time_text

NEXT: Final = ".next"


@dataclass(frozen=True, slots=True)
class Made:
    """A new key and where it is."""

    key: SecretKey
    path: Path

    def said(self) -> dict[str, Any]:
        """Of it in a JSON result."""
        return {
            "use": self.key.kind.value,
            "key_id": self.key.key_id,
            "secret_key_file": str(self.path),
            "valid_until_us": self.key.valid_until_us,
        }


def create_secret_keys(
    config: Config,
    folder: Path | None,
    kinds: Sequence[KeyKind],
    days: int | None,
    now_us: int,
    *,
    if_absent: bool,
) -> list[Made]:
    """One of each, all or none; raises CommandError. With `if_absent`, those that exist must be readable."""
    made: list[Made] = []
    try:
        for kind in kinds:
            path = place_of(config, folder, kind)
            if if_absent and path.exists():
                _read(path, kind)
                continue
            made.append(_created(path, kind, days, now_us))
    except BaseException:  # half a set would stand in the way of the next try
        for one in made:
            one.path.unlink()
        raise
    return made


def rotate_secret_key(
    config: Config, folder: Path | None, kind: KeyKind, days: int | None, now_us: int
) -> tuple[SecretKey, Made]:
    """The key that is there, and its successor beside it. Raises CommandError."""
    path = place_of(config, folder, kind)
    old = _read(path, kind)
    following = path.with_name(path.name + NEXT)
    if following.exists():
        raise CommandError(
            f"{following}: a successor exists: put it in the place of {path} on every gateway, or remove it",
            Exit.USAGE,
        )
    return old, _created(following, kind, days, now_us)


def place_of(config: Config, folder: Path | None, kind: KeyKind) -> Path:
    """Where this kind's key is; raises CommandError where nothing says."""
    if folder is not None:
        return folder / f"{kind.value}.key"
    setting = f"{kind.value}_key_file"
    named: str | None = getattr(config.gateway.privacy, setting)
    if named is None:
        raise CommandError(
            f"the configuration does not name gateway.privacy.{setting}; name a folder instead: "
            f"`klaxon keys create FOLDER --for {kind.value}`",
            Exit.USAGE,
        )
    return Path(named)


def created_lines(made: Sequence[Made]) -> list[str]:
    """What a person is told."""
    lines = []
    for one in made:
        until = time_text(one.key.valid_until_us)
        lines.append(f"{one.path}: secret key {one.key.key_id} for {one.key.kind.value}, until {until}")
    if made:
        lines += ["for the configuration file:", "gateway:", "  privacy:"]
        lines += [f"    {one.key.kind.value}_key_file: {one.path.absolute()}" for one in made]
    return lines


def rotated_lines(old: SecretKey, path: Path, made: Made) -> list[str]:
    """What a person is told to do now: `path`, where the old one is."""
    key, kept = made.key, path.with_name(f"{path.stem}-{old.key_id}{path.suffix}")
    kind = key.kind
    lines = [
        f"{made.path}: secret key {key.key_id} for {kind.value}, until {time_text(key.valid_until_us)}",
        f"1. copy it to all gateways{' and to whoever reads texts' if kind is KeyKind.TEXT else ''}",
        f"2. there `mv {path} {kept}` and `mv {made.path} {path}`, then restart them one after another",
    ]
    if kind is KeyKind.TEXT:
        lines.append(f"3. keep {kept.name} for as long as what it encrypted is to be read; then destroy it")
    elif kind is KeyKind.PSEUDONYM:
        lines.append(f"3. destroy {kept.name} after a day, when no topic holds its pseudonyms any more")
    else:
        lines.append("3. equal prompts have another signature from then on: comparisons over time begin anew")
    return lines


def _created(path: Path, kind: KeyKind, days: int | None, now_us: int) -> Made:
    if kind is KeyKind.TEXT and days is not None and days > MOST_DAYS:
        raise CommandError(
            f"a key for texts is valid for {MOST_DAYS} days at most (C1); lower --days", Exit.USAGE
        )
    key = new_secret_key(kind, now_us, MOST_DAYS if days is None else days)
    try:
        create_secret_key_file(path, key)
    except SecretKeyError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    return Made(key, path)


def _read(path: Path, kind: KeyKind) -> SecretKey:
    try:
        return read_secret_key(path, kind)
    except SecretKeyError as error:
        raise CommandError(str(error), Exit.USAGE) from None
