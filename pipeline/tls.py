"""TLS as a client of ours does it: verified, with a certificate of its own where asked for one."""

from __future__ import annotations

import contextlib
import ssl
import time
from pathlib import Path
from typing import Final, Literal

from pipeline.errors import PipelineError
from pipeline.secret import Secret

TRIES: Final = 5
PAUSE_S: Final = 0.1

Setting = Literal["ca_file", "certificate_file", "key_file", "key_password"]


class TlsFileError(PipelineError):
    """A certificate or key cannot be used; `setting` is the one that names it."""

    def __init__(self, setting: Setting, message: str) -> None:
        super().__init__(message)
        self.setting = setting


class _MismatchError(TlsFileError):
    """OpenSSL opens the file of a certificate a second time for its key: what was renewed in between does
    not fit, and neither do two files of which one is renewed already."""


def client_context(
    ca_file: str | None, certificate_file: str | None, key_file: str | None, key_password: Secret
) -> ssl.SSLContext:
    """A context that verifies the server's certificate and name; there is no switch to leave that out.

    `ca_file`: PEM of the authorities to trust, None: the system's. `certificate_file` with the chain and
    `key_file` (None: in the same file): who we are. Raises TlsFileError; reads the files, blocks: for up to
    TRIES × PAUSE_S where key and certificate do not belong together, as while they are being renewed.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(_MismatchError):
            return _context(ca_file, certificate_file, key_file, key_password)
        time.sleep(PAUSE_S)
    return _context(ca_file, certificate_file, key_file, key_password)


def _context(
    ca_file: str | None, certificate_file: str | None, key_file: str | None, key_password: Secret
) -> ssl.SSLContext:
    for setting, path in (
        ("ca_file", ca_file),
        ("certificate_file", certificate_file),
        ("key_file", key_file),
    ):
        _readable(setting, path)  # type: ignore[arg-type]  # the names above are a Setting's
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise TlsFileError("ca_file", f"{ca_file} holds no certificate in PEM") from None
    if certificate_file is None:
        return context
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True  # without this function OpenSSL would ask on the terminal
        return key_password.reveal()

    try:
        context.load_cert_chain(certificate_file, key_file, password)
    except (ssl.SSLError, ValueError) as error:
        raise _chain_error(certificate_file, key_file or certificate_file, error, asked=asked) from None
    return context


def _readable(setting: Setting, path: str | None) -> None:
    try:
        if path is not None:
            Path(path).read_bytes()
    except OSError as error:
        raise TlsFileError(setting, f"{path} cannot be read: {error.strerror}") from None


def _chain_error(certificate: str, key: str, error: Exception, *, asked: bool) -> TlsFileError:
    if asked:
        return TlsFileError("key_password", f"it does not open {key}")
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return _MismatchError("key_file", f"{key} does not belong to the certificate {certificate}")
    if "-----BEGIN CERTIFICATE-----" not in Path(certificate).read_text(errors="replace"):
        return TlsFileError("certificate_file", f"{certificate} holds no certificate in PEM")
    return TlsFileError("key_file", f"{key} holds no usable private key in PEM")
