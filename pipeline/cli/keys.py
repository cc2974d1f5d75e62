"""`klaxon keys …`: signing keys and the trust file that readers go by; the gateway's secret keys."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.files import replace_file
from pipeline.cli.options import config_option, json_option
from pipeline.cli.secret_keys import (
    NEXT,
    Made,
    create_secret_keys,
    created_lines,
    place_of,
    rotate_secret_key,
    rotated_lines,
)
from pipeline.config import Config
from pipeline.key_file import KeyFileError, create_key_file, read_key_file
from pipeline.secret_key_file import KeyKind
from pipeline.signatures import KEY_SETTING
from pipeline.trust_file import Entry, TrustFileError, read_trust_file, time_text, trust_text
from schemas.signing import Signer, TrustedKey, Use

DAY_US: Final = 86_400_000_000
SKEW_US: Final = 300_000_000
"""A new key is valid since a moment ago: clocks of readers differ."""
TRUST_FILE: Final = "trust.yaml"
SIGNING_DAYS: Final = 365
GATEWAY: Final = "gateway"
"""All secret keys of a gateway."""
PURPOSES: Final = (*(use.value for use in Use), *(kind.value for kind in KeyKind))
WHO: Final = {
    Use.DIRECTIVES: ("gates", "routers and gates"),
    Use.COMMANDS: ("commands", "gates"),
    Use.CONSENT: ("consents", "gateways"),
}
"""Who signs, and who reads."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where keys and trust file are."""

    private: dict[Use, Path]
    trust: Path


@dataclass(frozen=True, slots=True)
class Created:
    """Signing keys that were made, and all that the trust file holds now."""

    places: Places
    made: list[tuple[Use, Signer]]
    entries: dict[str, Entry]


@click.group()
def keys() -> None:
    """Make the keys of an installation, and replace them without a pause.

    Signing keys (directives, commands, consent) come with a trust file; the gateway's secret keys (signature,
    pseudonym, text) are for its machines alone.

    Example: klaxon keys create keys
    """


@keys.command()
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--for", "--kind", "wanted", type=click.Choice([*PURPOSES, GATEWAY]), multiple=True,
    help="Only the key for this, may be repeated; gateway: signature, pseudonym and text. Without it those "
    "that sign directives and commands.",
)  # fmt: skip
@click.option("--days", type=click.IntRange(min=1, max=36_500), show_default="365; of secret keys 90",
              help="How long it is valid; a key for texts 90 days at most.")  # fmt: skip
@click.option("--if-absent", is_flag=True, help="Leave a key that exists as it is.")
@config_option
@json_option
def create(
    config: Config,
    folder: Path | None,
    wanted: tuple[str, ...],
    days: int | None,
    if_absent: bool,
    as_json: bool,
) -> int:
    """Make keys: files that only you can read, and for those that sign, entries in the trust file.

    FOLDER gets directives.key, commands.key and trust.yaml, or what --for names; without it the files are
    those that the configuration names under `signatures` and `gateway.privacy`. An existing key is never
    overwritten.

    \b
    Example:
      klaxon keys create keys
      klaxon keys create keys --for commands --days 90
      klaxon keys create keys --for gateway
    """
    kinds = [kind for kind in KeyKind if kind.value in wanted or GATEWAY in wanted]
    uses = [use for use in Use if use.value in wanted] if wanted else list(KEY_SETTING)
    secret = create_secret_keys(config, folder, kinds, days, _now_us(), if_absent=if_absent)
    try:
        signing = (
            _create_signing_keys(config, folder, uses, days or SIGNING_DAYS, if_absent) if uses else None
        )
    except BaseException:  # all or none
        for one in secret:
            one.path.unlink()
        raise
    _tell_created(signing, secret, as_json)
    return Exit.OK


def _create_signing_keys(
    config: Config, folder: Path | None, uses: list[Use], days: int, if_absent: bool
) -> Created:
    places = _places(config, folder, uses)
    made: list[tuple[Use, Signer]] = []
    with _only_writer(places.trust):
        entries = _entries(places.trust)
        try:
            for one in uses:
                if if_absent and places.private[one].exists():
                    _believed(places, one, entries)
                    continue
                signer = _created(places.private[one])
                entries[signer.key_id] = _entry(signer, one, days)
                made.append((one, signer))
            if made:
                replace_file(places.trust, trust_text(entries).encode())
        except BaseException:  # nobody would trust those that were made, and they would stand in the way
            for use_made, _ in made:
                places.private[use_made].unlink()
            raise
    return Created(places, made, entries)


@keys.command()
@click.argument("purpose", metavar="|".join(PURPOSES), type=click.Choice(PURPOSES))
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--overlap-days", type=click.IntRange(min=0, max=3_650), default=7, show_default=True,
              help="How long the old key stays trusted.")  # fmt: skip
@click.option("--days", type=click.IntRange(min=1, max=36_500), show_default="365; of secret keys 90",
              help="How long the new key is valid; a key for texts 90 days at most.")  # fmt: skip
@config_option
@json_option
def rotate(
    config: Config, purpose: str, folder: Path | None, overlap_days: int, days: int | None, as_json: bool
) -> int:
    """Make the successor of a key, beside it: readers trust both before the writer changes over.

    The new key is written as NAME.next; an old one that signs stays trusted for --overlap-days. What is left
    to do is printed: hand out the trust file, then put the new key in the old one's place.

    \b
    Example: klaxon keys rotate directives keys
    """
    if purpose in list(KeyKind):
        kind = KeyKind(purpose)
        before, made = rotate_secret_key(config, folder, kind, days, _now_us())
        if as_json:
            click.echo(msgspec.json.encode({"old": before.key_id, **made.said()}).decode())
        else:
            click.echo("\n".join(rotated_lines(before, place_of(config, folder, kind), made)))
        return Exit.OK
    return _rotate_signing_key(config, folder, Use(purpose), overlap_days, days or SIGNING_DAYS, as_json)


def _rotate_signing_key(
    config: Config, folder: Path | None, chosen: Use, overlap_days: int, days: int, as_json: bool
) -> int:
    places = _places(config, folder, [chosen])
    old_path = places.private[chosen]
    new_path = old_path.with_name(old_path.name + NEXT)
    with _only_writer(places.trust):
        entries = _entries(places.trust)
        old = _believed(places, chosen, entries)
        if new_path.exists():
            raise CommandError(
                f"{new_path}: a successor exists: `mv {new_path} {old_path}` if all readers have the trust "
                "file, or remove it and its entry",
                Exit.USAGE,
            )
        signer = _created(new_path)
        before = entries[old.key_id]
        end_us = _now_us() + overlap_days * DAY_US
        until_us = before.key.valid_until_us
        ends = replace(before.key, valid_until_us=end_us if until_us is None else min(until_us, end_us))
        entries[old.key_id] = Entry(ends, before.note)
        entries[signer.key_id] = _entry(signer, chosen, days)
        try:
            replace_file(places.trust, trust_text(entries).encode())
        except BaseException:  # as above
            new_path.unlink()
            raise
    assert ends.valid_until_us is not None
    if as_json:
        said = {
            "use": chosen, "old": old.key_id, "old_valid_until_us": ends.valid_until_us, "new": signer.key_id,
            "private_key_file": str(new_path), "trust_file": str(places.trust),
        }  # fmt: skip
        click.echo(msgspec.json.encode(said).decode())
        return Exit.OK
    who, readers = WHO[chosen]
    click.echo(f"{new_path}: private key {signer.key_id}, signs {chosen.value}")
    until = time_text(ends.valid_until_us)
    click.echo(f"{places.trust}: trusts {signer.key_id}, and {old.key_id} until {until}")
    click.echo(f"1. copy {places.trust} to all {readers}; they read it within a second, without a restart")
    gates = "" if chosen is Use.CONSENT else "; running gates take it up by themselves"
    click.echo(f"2. then `mv {new_path} {old_path}` where {who} sign{gates}")
    if chosen is Use.DIRECTIVES:
        click.echo("3. restart the gates one after another: each writes anew what the old key signed")
    click.echo(
        f"{4 if chosen is Use.DIRECTIVES else 3}. after {until} take {old.key_id} out of {places.trust}"
    )
    return Exit.OK


def _places(config: Config, folder: Path | None, uses: list[Use]) -> Places:
    if folder is not None:
        return Places({use: folder / f"{use.value}.key" for use in uses}, folder / TRUST_FILE)
    settings = config.signatures
    if Use.CONSENT in uses:
        raise CommandError(
            "whoever asks users for consent has this key, so no configuration names it; name a folder: "
            "`klaxon keys create FOLDER --for consent`",
            Exit.USAGE,
        )
    private = {use: getattr(settings, KEY_SETTING[use]) for use in uses}
    missing = [f"signatures.{KEY_SETTING[use]}" for use in uses if private[use] is None]
    missing += ["signatures.trust_file"] if settings.trust_file is None else []
    if missing or settings.trust_file is None:
        raise CommandError(
            f"the configuration does not name {', '.join(missing)}; name a folder instead: "
            "`klaxon keys create FOLDER`",
            Exit.USAGE,
        )
    return Places({use: Path(path) for use, path in private.items()}, Path(settings.trust_file))


def _entries(trust: Path) -> dict[str, Entry]:
    if not trust.exists():
        return {}
    try:
        return read_trust_file(trust)
    except TrustFileError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def _believed(places: Places, use: Use, entries: dict[str, Entry]) -> Signer:
    """The private key that is there; one that the trust file does not hold ends the command.

    It is not put in: it may have been taken out.
    """
    path = places.private[use]
    try:
        signer = read_key_file(path)
    except KeyFileError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if signer.key_id not in entries:
        raise CommandError(
            f"{places.trust}: does not hold {signer.key_id}, the key of {path}: nobody trusts it; "
            f"name the right files, or move {path} away and begin anew with `klaxon keys create`",
            Exit.USAGE,
        )
    return signer


def _created(path: Path) -> Signer:
    try:
        return create_key_file(path)
    except KeyFileError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def _entry(signer: Signer, use: Use, days: int) -> Entry:
    now_us = _now_us()
    key = TrustedKey(signer.public_key, frozenset({use}), now_us - SKEW_US, now_us + days * DAY_US)
    return Entry(key)


def _tell_created(signing: Created | None, secret: list[Made], as_json: bool) -> None:
    if as_json:
        said: dict[str, Any] = {"keys": [one.said() for one in secret]}
        if signing is not None:
            said["trust_file"] = str(signing.places.trust)
            said["keys"] = [
                {"use": use, "key_id": signer.key_id, "private_key_file": str(signing.places.private[use])}
                for use, signer in signing.made
            ] + said["keys"]
        click.echo(msgspec.json.encode(said).decode())
        return
    if not secret and (signing is None or not signing.made):
        click.echo("all keys exist; nothing was made", err=True)
        return
    if signing is not None and signing.made:
        _tell_signing(signing)
    for line in created_lines(secret):
        click.echo(line)


def _tell_signing(created: Created) -> None:
    places, made, entries = created.places, created.made, created.entries
    for use, signer in made:
        click.echo(f"{places.private[use]}: private key {signer.key_id}, signs {use.value}")
    click.echo(f"{places.trust}: trusts them; the entries:")
    text = trust_text({signer.key_id: entries[signer.key_id] for _, signer in made})
    click.echo(text[text.index("\nkeys:") + len("\nkeys:\n") :].rstrip())
    click.echo("for the configuration file:")
    named = [use for use, _ in made if use in KEY_SETTING]
    if named:
        click.echo(f"signatures:\n  trust_file: {places.trust.absolute()}")
    for use in named:
        click.echo(f"  {KEY_SETTING[use]}: {places.private[use].absolute()}")
    if len(named) < len(made):
        click.echo(f"gateway:\n  privacy:\n    consent_trust_file: {places.trust.absolute()}")


@contextmanager
def _only_writer(trust: Path) -> Iterator[None]:
    """Two commands at once must not lose a key: the folder is locked while the trust file is rewritten."""
    try:
        trust.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(trust.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CommandError(
            f"{trust.parent}: cannot be used: {error.strerror}; name another folder", Exit.USAGE
        ) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise CommandError(
            f"{trust}: cannot be written: {error.strerror}; name another folder", Exit.USAGE
        ) from None
    finally:
        os.close(folder)


def _now_us() -> int:
    return time.time_ns() // 1000
