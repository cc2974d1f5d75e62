"""Private signing keys in files: PKCS#8 PEM, for nobody but their owner and group to read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from pipeline.errors import PipelineError
from pipeline.file_version import LOOK_EVERY_S, file_version
from pipeline.private_file import PrivateFiles
from schemas.plain import Log, Plain
from schemas.signing import Signer

log: Log = logging.getLogger("klaxon.signatures")


class KeyFileError(PipelineError):
    """A private key cannot be used or written; the message names file and remedy, never its content."""


FILES: Final = PrivateFiles("private key", 1 << 16, KeyFileError)


def read_key_file(path: Path) -> Signer:
    """The private key in this file. Raises KeyFileError. Blocks."""
    content = FILES.read(path, "`klaxon keys create` makes one")
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(
            f"{path}: no Ed25519 private key (PKCS#8, PEM, no passphrase); `klaxon keys create` makes one"
        )
    return Signer(key.private_bytes_raw())


def create_key_file(path: Path) -> Signer:
    """Write a new private key, mode 0600; never over an existing file. Raises KeyFileError. Blocks."""
    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    FILES.create(path, content)
    return Signer(key.private_bytes_raw())


class WatchedKey:
    """A private key as a running process uses it: another one in its file's place is taken up."""

    def __init__(self, path: Path) -> None:
        """Reads the file: blocks; raises KeyFileError."""
        self._path = path
        self._seen = file_version(path)
        self._signer = read_key_file(path)
        self._looked_s = 0.0
        self._told = self._seen

    @property
    def signer(self) -> Signer:
        """What to sign with now."""
        return self._signer

    def poll(self, now_s: float, trusted: Callable[[Signer], bool] = lambda _: True) -> None:
        """Read the file again if it is another one, at most every LOOK_EVERY_S of this monotonic time.

        A file that cannot be read changes nothing, nor does a key that is not trusted, until it is; both are
        said once. Reading blocks.
        """
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        seen = file_version(self._path)
        if seen == self._seen:
            return
        try:
            signer = read_key_file(self._path)
            if not trusted(signer):
                raise KeyFileError(
                    f"{self._path}: by the trust file here {signer.key_id} may not sign this now; correct "
                    "its entry, or name another key"
                )
        except KeyFileError as error:
            if seen != self._told:
                self._told = seen
                log.error("%s; until then %s signs", error, Plain(self._signer.key_id))
            return
        self._seen = self._told = seen
        if signer.key_id != self._signer.key_id:
            log.warning("%s: %s signs from now on, no longer %s",
                        Plain(self._path), Plain(signer.key_id), Plain(self._signer.key_id))  # fmt: skip
        self._signer = signer
