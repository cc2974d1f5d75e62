"""A notification of a decision: which ones, what it says, its signature, what an answer to it means. Pure.

Headers and signature are those of the Standard Webhooks specification (`webhook-id`, `webhook-timestamp`,
`webhook-signature: v1,BASE64`), so that receivers verify with a library they have.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection, Sequence
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from pipeline.core.hosts import is_loopback
from schemas.control import Cause, Decision, RolloutState

CONTENT_TYPE: Final = "application/json"
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 (what a secret begins with)
LEAST_SECRET_BYTES: Final = 24
RETRY_FIRST_S: Final = 1.0
RETRY_LONGEST_S: Final = 300.0

Judgement: TypeAlias = Literal["delivered", "again", "refused"]
"""`again`: the same may be taken later. `refused`: this one never will be, others may."""
NEVER_TAKEN: Final = frozenset({400, 405, 411, 413, 414, 415, 422})


class NotificationError(Exception):
    """A webhook cannot be used as configured; the message says why and what to do."""


class Happened(Struct, frozen=True, kw_only=True):
    """What a receiver is told about a decision: numbers and names, never a text of a prompt or an answer."""

    rollout: str
    kind: str
    reason: str
    where: str
    """Topic, partition and offset of the decision: the same notification carries the same."""
    ts_us: int
    generation: int | None = None
    epoch: int | None = None
    state: RolloutState | None = None
    weights: dict[str, float] = {}
    level: int = 0
    fallback: str | None = None
    cause: Cause | None = None


class Notification(Struct, frozen=True, kw_only=True):
    """One message. `id` is the same however often it is sent: receivers know repetitions by it."""

    id: str
    body: bytes


def notification_of(
    decision: Decision, rollout: str, where: str, kinds: Collection[str]
) -> Notification | None:
    """What to send about a decision; None if nothing. `where`: `topic/partition/offset`."""
    if decision.kind not in kinds:
        return None
    directive = decision.directive
    happened = Happened(
        rollout=rollout,
        kind=decision.kind,
        reason=decision.reason,
        where=where,
        ts_us=decision.inputs.now_us,
        generation=None if directive is None else directive.generation,
        epoch=None if directive is None else directive.epoch,
        state=None if directive is None else directive.state,
        weights={} if directive is None else directive.weights,
        level=0 if directive is None else directive.level,
        fallback=None if directive is None else directive.fallback,
        cause=None if directive is None else directive.cause,
    )
    return made(where, f"klaxon.{decision.kind}", happened)


def made(ident: str, kind: str, data: object) -> Notification:
    """A message of this type."""
    return Notification(id=ident, body=msgspec.json.encode({"type": kind, "data": data}))


def secret_of(text: str) -> bytes:
    """The key in `whsec_BASE64`. Raises NotificationError; no message quotes it."""
    value = text.strip()
    if not value.startswith(SECRET_PREFIX):
        raise NotificationError(
            f"a secret begins with {SECRET_PREFIX}: make one with"
            " `printf 'whsec_%s\\n' \"$(openssl rand -base64 32)\"`"
        )
    try:
        key = base64.b64decode(value.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:  # no base64, or not even ASCII
        raise NotificationError(f"a secret is {SECRET_PREFIX} and base64; this one is not") from None
    if len(key) < LEAST_SECRET_BYTES:
        raise NotificationError(f"a secret holds at least {LEAST_SECRET_BYTES} bytes; this one {len(key)}")
    return key


def headers(message: Notification, now_s: int, keys: Sequence[bytes]) -> dict[str, str]:
    """Of one attempt. One signature per key, so that keys can be rotated without a gap."""
    return {
        "content-type": CONTENT_TYPE,
        "webhook-id": message.id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": " ".join(signature(message, now_s, key) for key in keys),
    }


def signature(message: Notification, now_s: int, key: bytes) -> str:
    """`v1,` and the base64 of HMAC-SHA-256 over `id.timestamp.body`."""
    signed = f"{message.id}.{now_s}.".encode() + message.body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def judged(status: int) -> Judgement:
    """What an HTTP status means. A redirect is not followed: the address must be mended, it is sent again."""
    if 200 <= status < 300:
        return "delivered"
    return "refused" if status in NEVER_TAKEN else "again"


def wait_s(attempt: int, retry_after_s: float | None, jitter: float) -> float:
    """Before the next attempt, after the n-th failure (from 0): doubling, at most RETRY_LONGEST_S.

    Within that, not before the receiver asked for it. `jitter` in 0..1.
    """
    backed_off = min(RETRY_LONGEST_S, RETRY_FIRST_S * 2.0 ** min(attempt, 16)) * (0.75 + 0.25 * jitter)
    return min(max(backed_off, retry_after_s or 0.0), RETRY_LONGEST_S)


def checked_url(url: str, *, allow_http: bool) -> str:
    """The address if it may be used. Raises NotificationError; no message quotes more than its host."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")  # as it is looked up: no label is empty or too long
    except ValueError:
        raise NotificationError("notify.url is no address; write https://HOST/PATH") from None
    if parts.scheme not in ("http", "https") or not host:
        raise NotificationError("notify.url is no address; write https://HOST/PATH")
    if parts.scheme == "http" and not is_loopback(host) and not allow_http:
        raise NotificationError(
            f"notify.url: http to {host} can be read and altered on its way; use https,"
            " or set notify.allow_http: true"
        )
    return url
