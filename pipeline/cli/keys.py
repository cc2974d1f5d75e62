"""`klaxon keys …`: signing keys and the trust file that readers go by."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
import msgspec

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.files import replace_file
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config
from pipeline.key_file import KeyFileError, create_key_file, read_key_file
from pipeline.signatures import KEY_SETTING
from pipeline.trust_file import Entry, TrustFileError, read_trust_file, time_text, trust_text
from schemas.signing import Signer, TrustedKey, Use

DAY_US: Final = 86_400_000_000
SKEW_US: Final = 300_000_000
"""A new key is valid since a moment ago: clocks of readers differ."""
TRUST_FILE: Final = "trust.yaml"
NEXT: Final = ".next"


@dataclass(frozen=True, slots=True)
class Places:
    """Where keys and trust file are."""

    private: dict[Use, Path]
    trust: Path


@click.group()
def keys() -> None:
    """Make the keys that sign directives and commands, and replace them without a pause.

    Example: klaxon keys create keys
    """


@keys.command()
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--for", "use", type=click.Choice([use.value for use in Use]),
    help="Only the key that signs these; without it one for each.",
)  # fmt: skip
@click.option("--days", type=click.IntRange(min=1, max=36_500), default=365, show_default=True,
              help="How long it is valid.")  # fmt: skip
@click.option("--if-absent", is_flag=True, help="Leave a key that exists as it is.")
@config_option
@json_option
def create(
    config: Config, folder: Path | None, use: str | None, days: int, if_absent: bool, as_json: bool
) -> int:
    """Make signing keys: private key files that only you can read, and entries in the trust file.

    FOLDER gets directives.key, commands.key and trust.yaml; without it the files are those that the
    configuration names under `signatures`. An existing key is never overwritten.

    \b
    Example:
      klaxon keys create keys
      klaxon keys create keys --for commands --days 90
    """
    uses = list(Use) if use is None else [Use(use)]
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
    _tell_created(places, made, entries, as_json)
    return Exit.OK


@keys.command()
@click.argument("use", metavar="directives|commands", type=click.Choice([use.value for use in Use]))
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--overlap-days", type=click.IntRange(min=0, max=3_650), default=7, show_default=True,
              help="How long the old key stays trusted.")  # fmt: skip
@click.option("--days", type=click.IntRange(min=1, max=36_500), default=365, show_default=True,
              help="How long the new key is valid.")  # fmt: skip
@config_option
@json_option
def rotate(config: Config, use: str, folder: Path | None, overlap_days: int, days: int, as_json: bool) -> int:
    """Make the successor of a key, beside it: readers trust both before the writer changes over.

    The new private key is written as NAME.next; the old one stays trusted for --overlap-days. What is left
    to do is printed: hand out the trust file, then put the new key in the old one's place.

    \b
    Example: klaxon keys rotate directives keys
    """
    chosen = Use(use)
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
            "use": use, "old": old.key_id, "old_valid_until_us": ends.valid_until_us, "new": signer.key_id,
            "private_key_file": str(new_path), "trust_file": str(places.trust),
        }  # fmt: skip
        click.echo(msgspec.json.encode(said).decode())
        return Exit.OK
    who = "gates" if chosen is Use.DIRECTIVES else "commands"
    readers = "routers and gates" if chosen is Use.DIRECTIVES else "gates"
    click.echo(f"{new_path}: private key {signer.key_id}, signs {use}")
    until = time_text(ends.valid_until_us)
    click.echo(f"{places.trust}: trusts {signer.key_id}, and {old.key_id} until {until}")
    click.echo(f"1. copy {places.trust} to all {readers}; they read it within a second, without a restart")
    click.echo(f"2. then `mv {new_path} {old_path}` where {who} sign; running gates take it up by themselves")
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


def _tell_created(
    places: Places, made: list[tuple[Use, Signer]], entries: dict[str, Entry], as_json: bool
) -> None:
    if as_json:
        keys_made = [
            {"use": use, "key_id": signer.key_id, "private_key_file": str(places.private[use])}
            for use, signer in made
        ]
        said = {"keys": keys_made, "trust_file": str(places.trust)}
        click.echo(msgspec.json.encode(said).decode())
        return
    if not made:
        click.echo("all keys exist; nothing was made", err=True)
        return
    for use, signer in made:
        click.echo(f"{places.private[use]}: private key {signer.key_id}, signs {use.value}")
    click.echo(f"{places.trust}: trusts them; the entries:")
    text = trust_text({signer.key_id: entries[signer.key_id] for _, signer in made})
    click.echo(text[text.index("\nkeys:") + len("\nkeys:\n") :].rstrip())
    click.echo("for the configuration file:")
    click.echo(f"signatures:\n  trust_file: {places.trust.absolute()}")
    for use, _ in made:
        click.echo(f"  {KEY_SETTING[use]}: {places.private[use].absolute()}")


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
