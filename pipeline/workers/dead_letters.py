"""What cannot be read goes to `klaxon.dead-letter`: where it stands and why, no payload unless configured.

But a record of a version that this process does not know is nobody's fault and stops it: a dead letter would
take it out of every number after it.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from pipeline.errors import PipelineError
from pipeline.workers.records import Record
from pipeline.workers.transport import Link
from schemas.columns import Rejected
from schemas.control import DeadLetter
from schemas.topics import JSON, Topic

MOST_PER_RECORD: Final = 1_000
"""Letters one record may cause; the last one then says how many more there were."""


class VersionError(PipelineError):
    """A record of a version that this process does not read: it must not go on past it."""

    def __init__(self, record: Record, version: int) -> None:
        """Where it stands, and what to do."""
        super().__init__(
            f"{record.place}: offset {record.offset} is of record version {version}, which this Klaxon does "
            "not read; run the Klaxon that writes there, or a later one: it goes on from this record"
        )


def dead_letters(record: Record, rejected: Sequence[Rejected], *, payload: bool) -> Iterator[DeadLetter]:
    """One letter per rejected event, in order."""
    if not rejected:
        return
    digest = hashlib.sha256(record.value).hexdigest()
    body = base64.b64encode(record.value).decode() if payload else None
    kept = rejected if len(rejected) <= MOST_PER_RECORD else rejected[: MOST_PER_RECORD - 1]
    for item in kept:
        yield _letter(record, item, digest, body)
    if len(kept) < len(rejected):
        rest = Rejected(None, "", f"{len(rejected) - len(kept)} more events of this record were rejected")
        yield _letter(record, rest, digest, None)


async def send_letters(link: Link, letters: Iterable[DeadLetter]) -> list[Awaitable[Any]]:
    """Hand the letters to the producer, and count them; await what it returns for their acknowledgements."""
    sent = []
    for letter in letters:
        link.dead_letters.setdefault(letter.topic, Counter())[letter.kind] += 1
        sent.append(
            await link.send(
                Topic.DEAD_LETTER, msgspec.json.encode(letter), key=letter.topic.encode(), content_type=JSON
            )
        )
    return sent


def _letter(record: Record, item: Rejected, digest: str, body: str | None) -> DeadLetter:
    return DeadLetter(
        topic=record.topic.value,
        partition=record.partition,
        offset=record.offset,
        position=item.position,
        field=item.field,
        reason=item.reason,
        kind=item.kind or "value",
        sha256=digest,
        payload=body,
    )
