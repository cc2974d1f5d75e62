"""What protects an installation and is not there, or will not be for long."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agents.gateway.settings import GatewaySettings, PrivacySettings
from pipeline.cli.doctor.findings import Finding
from pipeline.config import Config, SignaturesConfig
from pipeline.core.hosts import is_loopback
from pipeline.errors import PipelineError
from pipeline.secret_key_file import KeyKind, SecretKeyError, read_secret_key
from pipeline.signatures import KEY_SETTING, NOT_REQUIRED, key_for
from pipeline.trust_file import TrustFileError, read_trust_file, time_text
from schemas.signing import Use

EXPIRES_WITHIN_US: Final = 14 * 86_400_000_000
SECRET_FILES: Final = (
    ("kafka", "password_file"), ("kafka", "key_file"), ("kafka", "key_password_file"),
    ("clickhouse", "password_file"), ("notify", "secret_file"),
    ("signatures", "directive_key_file"), ("signatures", "command_key_file"),
)  # fmt: skip
"""Section and key of every setting that names a file with a secret in it."""


def security_findings(config: Config, now_us: int) -> Iterator[Finding]:
    """Of this configuration, and of the key files that it names. Blocks."""
    yield from _transport(config)
    yield from _files(config)
    yield from _endpoint(config.monitoring.host)
    yield from _signatures(config.signatures, now_us)
    yield from _secret_keys(config.gateway.privacy, now_us)


def _transport(config: Config) -> Iterator[Finding]:
    if config.kafka.security == "plaintext":
        local = all(is_loopback(one.rpartition(":")[0]) for one in config.kafka.bootstrap.split(","))
        yield Finding(
            severity="note" if local else "warning",
            code="kafka_plaintext",
            where=f"Kafka at {config.kafka.bootstrap}",
            what="no TLS and no user: whoever reaches the broker may write directives",
            remedy="nothing, while only this machine reaches it" if local else "restrict who reaches it",
        )


def _files(config: Config) -> Iterator[Finding]:
    """Files that hold a secret and are for others to read, or say who is trusted and are for others to write.

    A warning, no refusal: what a container's secrets are mounted with is often not for its owner alone.
    """
    secret = {f"{section}.{key}": getattr(getattr(config, section), key) for section, key in SECRET_FILES}
    secret |= {f"gateway.{name}": path for name, path in _gateway_secrets(config.gateway)}
    if config.kafka.key_file is None:
        secret["kafka.certificate_file"] = config.kafka.certificate_file
    for setting, path in secret.items():
        if (mode := _mode(path)) & (stat.S_IRGRP | stat.S_IROTH):
            others = "everybody on this machine" if mode & stat.S_IROTH else "its group"
            yield _open_file(setting, f"{path} holds a secret and {others} may read it", f"chmod 600 {path}")
    for setting, trust, says in (
        ("signatures.trust_file", config.signatures.trust_file, "whose directives are obeyed"),
        ("gateway.privacy.consent_trust_file", config.gateway.privacy.consent_trust_file, "who may consent"),
    ):
        if (mode := _mode(trust)) & (stat.S_IWGRP | stat.S_IWOTH):
            others = "everybody on this machine" if mode & stat.S_IWOTH else "its group"
            what = f"{trust} says {says} and {others} may write it"
            yield _open_file(setting, what, f"chmod 644 {trust}")


def _gateway_secrets(settings: GatewaySettings) -> Iterator[tuple[str, str | None]]:
    for kind in KeyKind:
        yield f"privacy.{kind.value}_key_file", getattr(settings.privacy, f"{kind.value}_key_file")
    for number, pool in enumerate(settings.pools):
        yield f"pools[{number}].mirror_authorization_file", pool.mirror_authorization_file
    yield "embeddings.authorization_file", settings.embeddings.authorization_file


def _mode(path: str | None) -> int:
    """Permissions; 0 of a file that is not there: whoever reads it says so."""
    try:
        return 0 if path is None else Path(path).stat().st_mode
    except OSError:
        return 0


def _open_file(where: str, what: str, remedy: str) -> Finding:
    return Finding(severity="warning", code="file_open", where=where, what=what, remedy=remedy)


def _endpoint(host: str) -> Iterator[Finding]:
    if not is_loopback(host):
        yield Finding(
            severity="warning",
            code="monitoring_open",
            where="monitoring.host",
            what=f"/metrics is answered at {host}, to whoever reaches it: there is no login",
            remedy="let only Prometheus reach it, or set monitoring.host: 127.0.0.1",
        )


def _signatures(settings: SignaturesConfig, now_us: int) -> Iterator[Finding]:
    if not settings.required:
        yield Finding(
            severity="warning",
            code="signatures_off",
            where="signatures.required",
            what=NOT_REQUIRED.partition(": ")[2],
            remedy="klaxon keys create FOLDER, then signatures.required: true everywhere",
        )
        return
    if settings.trust_file is None:
        yield Finding(
            severity="warning",
            code="keys",
            where="signatures.trust_file",
            what="names no file: nothing can be verified with this configuration",
            remedy="klaxon keys create FOLDER",
        )
        return
    named: dict[Use, str] = {}
    for use, name in KEY_SETTING.items():
        if getattr(settings, name) is not None:
            try:
                if (key := key_for(settings, use)) is not None:
                    named[use] = key.signer.key_id
            except PipelineError as error:
                yield _broken(f"signatures.{name}", str(error))
    try:
        trusted = read_trust_file(Path(settings.trust_file))
    except TrustFileError as error:
        yield _broken("signatures.trust_file", str(error))
        return
    for use in KEY_SETTING:
        ends = [entry.key.valid_until_us for entry in trusted.values() if use in entry.key.signs]
        latest_us = max((end for end in ends if end is not None), default=0)
        own = trusted.get(named.get(use, ""))
        own_us = None if own is None else own.key.valid_until_us
        if None not in ends and latest_us < now_us + EXPIRES_WITHIN_US:
            until = f"ends {time_text(latest_us)}" if ends else "does not begin"
            yield Finding(
                severity="error" if latest_us < now_us else "warning",
                code="keys",
                where=settings.trust_file,
                what=f"trust in whoever signs {use.value} {until}",
                remedy=f"klaxon keys rotate {use.value}" if ends else f"klaxon keys create --for {use.value}",
            )
        elif own_us is not None and own_us < now_us + EXPIRES_WITHIN_US:
            yield Finding(
                severity="warning",
                code="keys",
                where=f"signatures.{KEY_SETTING[use]}",
                what=f"{named[use]}, which signs {use.value} here, ends {time_text(own_us)}",
                remedy="its successor is trusted: put that in its place (rotation, docs/security.md)",
            )


def _secret_keys(settings: PrivacySettings, now_us: int) -> Iterator[Finding]:
    """The gateway's: those that cannot be used, and those that are to be replaced."""
    for kind in KeyKind:
        name = f"{kind.value}_key_file"
        path: str | None = getattr(settings, name)
        if path is None:
            continue
        where = f"gateway.privacy.{name}"
        try:
            until_us = read_secret_key(Path(path), kind).valid_until_us
        except SecretKeyError as error:
            yield _broken(where, str(error))
            continue
        if until_us < now_us + EXPIRES_WITHIN_US:
            past = until_us < now_us
            stays = ": no text leaves the gateway" if past and kind is KeyKind.TEXT else ""
            yield Finding(
                severity="error" if stays else "warning",
                code="keys",
                where=where,
                what=f"{'was' if past else 'is'} to be replaced by {time_text(until_us)}{stays}",
                remedy=f"klaxon keys rotate {kind.value}",
            )


def _broken(where: str, what: str) -> Finding:
    return Finding(
        severity="error", code="keys", where=where, what=what, remedy="see there; docs/security.md"
    )
