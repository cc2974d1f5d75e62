"""What protects an installation and is not there, or will not be for long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pipeline.cli.doctor.findings import Finding
from pipeline.config import Config, SignaturesConfig
from pipeline.core.hosts import is_loopback
from pipeline.errors import PipelineError
from pipeline.signatures import KEY_SETTING, NOT_REQUIRED, key_for
from pipeline.trust_file import TrustFileError, read_trust_file, time_text
from schemas.signing import Use

EXPIRES_WITHIN_US: Final = 14 * 86_400_000_000


def security_findings(config: Config, now_us: int) -> Iterator[Finding]:
    """Of this configuration, and of the key files that it names. Blocks."""
    yield from _transport(config)
    yield from _signatures(config.signatures, now_us)


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
    for use in Use:
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


def _broken(where: str, what: str) -> Finding:
    return Finding(
        severity="error", code="keys", where=where, what=what, remedy="see there; docs/security.md"
    )
