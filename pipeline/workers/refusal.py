"""Why a broker turns a client away for good: asked anew, because clients keep the reason to themselves.

aiokafka logs why it could not connect and raises an error without it; Faust does the same. So whoever failed
asks here, with one connection more. Only what waiting does not mend is a refusal.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, Final

from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    NoError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
    for_code,
)
from aiokafka.protocol.admin import SaslHandShakeRequest

ASK_TIMEOUT_S: Final = 5.0


async def refusal(bootstrap: str, security: Mapping[str, Any]) -> str | None:
    """One line that names server, reason and setting; None where none refuses: they are away, or all is well.

    `bootstrap`: `host:port,…`; `security`: aiokafka's options. The first server that answers decides.
    """
    for host, port, _ in collect_hosts(bootstrap, randomize=False):
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                found = await _refusal_of(host, port, security)
        except TimeoutError:
            continue
        if found is None:
            continue
        return f"Kafka at {host}:{port} {found}" if found else None
    return None


async def _refusal_of(host: str, port: int, security: Mapping[str, Any]) -> str | None:
    """Why this server refuses; empty: it does not; None: it says nothing about it."""
    tls = security["security_protocol"] in ("SSL", "SASL_SSL")
    try:
        conn = await create_conn(host, port, request_timeout_ms=int(ASK_TIMEOUT_S * 1000), **security)
    except UnsupportedSaslMechanismError:
        return f"knows no log-in by {security['sasl_mechanism']}: set kafka.sasl_mechanism to what it offers"
    except IllegalSaslStateError:
        return "asks for no log-in on this port: set kafka.security without SASL, or name the SASL port"
    except SaslAuthenticationFailed:
        user = security.get("sasl_plain_username")
        return f"refuses the log-in of {user!r}: check kafka.username and kafka.password"
    except ssl.SSLCertVerificationError as error:
        remedy = "check kafka.ca_file"
        if "mismatch" in error.verify_message:
            remedy = "kafka.bootstrap, and what the broker advertises, must be names in it"
        return f"shows a certificate that we do not trust ({error.verify_message.rstrip('.')}): {remedy}"
    except (KafkaError, OSError) as error:
        if isinstance(error, ConnectionRefusedError):
            return None
        if tls and await _answers(host, port, None):
            return "speaks no TLS on this port: name its TLS port, or change kafka.security"
        if not tls and await _answers(host, port, _unverified()):
            return "speaks TLS on this port: set kafka.security to ssl or sasl_ssl"
        return _alert(error) if tls else None
    try:
        asks = "sasl_mechanism" not in security and await _asks_for_log_in(conn)
    finally:
        await conn.close()
    return "asks for a log-in on this port: set kafka.security to sasl_ssl" if asks else ""


async def _asks_for_log_in(conn: AIOKafkaConnection) -> bool:
    """A listener with SASL takes its first step, if with another mechanism; one without says it has none."""
    try:
        answer = await conn.send(SaslHandShakeRequest("SCRAM-SHA-512"))
    except (KafkaError, OSError):
        return False
    return for_code(answer.error_code) in (NoError, UnsupportedSaslMechanismError)


def _alert(error: BaseException | None) -> str | None:
    """What the server's last word in the handshake means to us, where it had one."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    said = str(error and error.reason)
    if "CERTIFICATE" in said or "UNKNOWN_CA" in said:
        return f"refuses our certificate ({said.lower().replace('_', ' ')}): check kafka.certificate_file"
    return None


def _unverified() -> ssl.SSLContext:
    """To learn whether TLS is spoken at all: nothing is said over such a connection."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _answers(host: str, port: int, context: ssl.SSLContext | None) -> bool:
    """Whether the server speaks TLS (with a context), or Kafka's protocol in the clear (without)."""
    try:
        if context is None:
            conn = await create_conn(host, port, request_timeout_ms=int(ASK_TIMEOUT_S * 1000))
            await conn.close()
        else:
            _, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.transport.abort()
    except (KafkaError, OSError):
        return False
    return True
