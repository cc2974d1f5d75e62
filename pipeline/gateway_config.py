"""Section `gateway` of the configuration: its nested keys and variables, and the files that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from agents.gateway.settings import Fault, GatewaySettings
from pipeline.secret import Secret, SecretFileError, read_secret_file
from pipeline.tls import TlsFileError, client_context

KeyPath: TypeAlias = tuple[str | int, ...]
_MADE_BY_US: Final = {"signature_key_file", "pseudonym_key_file", "text_key_file", "consent_trust_file"}
_NEEDED: Final = ("signature_key_file", "pseudonym_key_file")


def named(path: KeyPath) -> str:
    """`pools[1].engines[0].url`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def fields(kind: type[Struct]) -> Iterator[tuple[str, type[Struct] | None, bool]]:
    """Each key; the structure that it holds, if one; and whether it is a list (of these)."""
    described = msgspec.inspect.type_info(kind)
    if not isinstance(described, msgspec.inspect.StructType):
        raise TypeError(f"{kind} is no structure")
    for field in described.fields:
        held = field.type
        is_list = isinstance(held, msgspec.inspect.VarTupleType)
        if isinstance(held, msgspec.inspect.VarTupleType):
            held = held.item_type
        yield field.encode_name, held.cls if isinstance(held, msgspec.inspect.StructType) else None, is_list


def unknown_key(
    content: object, kind: type[Struct] = GatewaySettings, path: KeyPath = ()
) -> tuple[KeyPath, tuple[str, ...]] | None:
    """The first key that nobody knows, and the known ones there. What has a wrong type is passed over."""
    if not isinstance(content, dict):
        return None
    nested = {name: (held, is_list) for name, held, is_list in fields(kind)}
    for key, value in content.items():
        if key not in nested:
            return (*path, key), tuple(nested)
        held, is_list = nested[key]
        if held is None:
            continue
        parts = enumerate(value) if is_list and isinstance(value, list) else ()
        inside = [((*path, key, at), one) for at, one in parts] if is_list else [((*path, key), value)]
        for place, one in inside:
            found = unknown_key(one, held, place)
            if found is not None:
                return found
    return None


def variables(
    kind: type[Struct] = GatewaySettings, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The path of every key that is no mapping, and whether it is a list: those stand in the file only."""
    for name, held, is_list in fields(kind):
        if held is None or is_list:
            yield (*path, name), is_list
        else:
            yield from variables(held, (*path, name))


def missing_files(settings: GatewaySettings) -> Iterator[Fault]:
    """What only the gateway itself needs: files that are not named, or not there. Reads them; blocks."""
    for key in _NEEDED:
        if getattr(settings.privacy, key) is None:
            yield Fault(("privacy", key), "missing; `klaxon keys create` makes one")
    for key in settings.privacy.__struct_fields__:
        yield from _unreadable(("privacy", key), getattr(settings.privacy, key))
    secrets: list[tuple[KeyPath, str | None]] = [
        (("pools", at, "mirror_authorization_file"), pool.mirror_authorization_file)
        for at, pool in enumerate(settings.pools)
    ]
    secrets.append((("embeddings", "authorization_file"), settings.embeddings.authorization_file))
    for place, path in secrets:
        if path is None:
            continue
        try:
            read_secret_file(path)
        except SecretFileError as error:
            yield Fault(place, str(error))
    if settings.ca_file is not None:
        try:
            client_context(settings.ca_file, None, None, Secret())
        except TlsFileError as error:
            yield Fault(("ca_file",), str(error))


def _unreadable(place: KeyPath, path: str | None) -> Iterator[Fault]:
    if path is None:
        return
    remedy = "`klaxon keys create` makes one" if place[-1] in _MADE_BY_US else "name another file"
    try:
        with Path(path).open("rb") as file:
            if not file.read(1):
                yield Fault(place, f"{path} is empty; {remedy}")
    except OSError as error:
        yield Fault(place, f"{path} cannot be read: {error.strerror}; {remedy}")
