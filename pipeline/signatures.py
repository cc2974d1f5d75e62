"""What a process needs to sign and to verify, as its configuration says; refuses to begin without it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from pipeline.config import SignaturesConfig
from pipeline.errors import PipelineError
from pipeline.key_file import WatchedKey
from pipeline.trust_file import WatchedTrust, time_text
from schemas.signing import Use

KEY_SETTING: Final = {Use.DIRECTIVES: "directive_key_file", Use.COMMANDS: "command_key_file"}
NOT_REQUIRED: Final = (
    "signatures.required is false: whoever may write the topics is obeyed, with or without a signature"
)
"""What a process says at its start where this is so."""


class SigningSetupError(PipelineError):
    """Keys are missing or do not fit together; the message names setting, file and remedy."""


def key_for(config: SignaturesConfig, use: Use) -> WatchedKey | None:
    """The key to sign with; None where none is named and none is required.

    A configured trust file must trust it: a signature that nobody believes is found here, not at its readers.
    Raises SigningSetupError, KeyFileError, TrustFileError. Blocks.
    """
    name = KEY_SETTING[use]
    path = getattr(config, name)
    if path is None:
        if config.required:
            raise _missing(name, f"the private key that signs {use.value}")
        return None
    key = WatchedKey(Path(path))
    if config.trust_file is not None:
        _check_trusted(key, use, WatchedTrust(Path(config.trust_file)), config.trust_file, path)
    return key


def trust_for(config: SignaturesConfig) -> WatchedTrust | None:
    """The keys to verify with; None where signatures are not required.

    Raises SigningSetupError, TrustFileError. Blocks.
    """
    if not config.required:
        return None
    if config.trust_file is None:
        raise _missing("trust_file", "the keys to trust")
    return WatchedTrust(Path(config.trust_file))


def _check_trusted(key: WatchedKey, use: Use, trust: WatchedTrust, trust_file: str, path: str) -> None:
    name = key.signer.key_id
    found = trust.trust.keys.get(name)
    if found is None:
        raise SigningSetupError(f"{trust_file}: does not hold {name}, the key of {path}; add its entry")
    if use not in found.signs:
        raise SigningSetupError(
            f"{trust_file}: {name}, the key of {path}, may not sign {use.value}; name another key"
        )
    if not found.is_valid(time.time_ns() // 1000):
        since = time_text(found.valid_from_us)
        until = "" if found.valid_until_us is None else f" until {time_text(found.valid_until_us)}"
        raise SigningSetupError(
            f"{trust_file}: {name}, the key of {path}, is valid from {since}{until}; "
            "make another one with `klaxon keys rotate`"
        )


def _missing(name: str, what: str) -> SigningSetupError:
    return SigningSetupError(
        f"signatures are required, and signatures.{name} (KLAXON_SIGNATURES_{name.upper()}) does not name "
        f"{what}; make keys with `klaxon keys create`, or turn signatures off with "
        "KLAXON_SIGNATURES_REQUIRED=false"
    )
