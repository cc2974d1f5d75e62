"""Workers with a known defect: `python -m tests.system.known_bad DEFECT KIND`. The judge must find each.

Each defect is one that was considered and is wrong (architecture.md, "Buckets"; reliability.md §1.5). Besides
it, the process is the worker as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

from pipeline.core import buckets, pairing, source
from pipeline.workers import gate_writer, transport


def commit_at_the_read_position() -> None:
    """What was read is committed: what it was read for is forgotten."""

    def commit(log: source.LogPosition) -> int | None:
        return log.next_offset

    source.LogPosition.commit = commit  # type: ignore[method-assign]


def commit_at_the_oldest_waiting_half() -> None:
    """A successor sees every half that still waits, but not what was matched or expired before.

    It trusts what it reads, as who commits so would: otherwise the warm-up would keep it silent.
    """
    take_flush = pairing.PairSource.take_flush
    read = pairing.PairSource.read

    def trusting_read(self: pairing.PairSource, meta: source.RecordMeta, decoded: object) -> None:
        read(self, meta, decoded)  # type: ignore[arg-type]
        self._log.whole_from = 0

    def flush(self: pairing.PairSource, *, waiting: float = 0.0) -> source.Flush:
        made = take_flush(self, waiting=waiting)
        waits = [record.offset for record, _ in self._groups.waiting()]
        oldest = min(waits, default=self._log.next_offset)
        return source.Flush(made.finals, made.fresh, made.pairs, oldest)

    pairing.PairSource.read = trusting_read  # type: ignore[method-assign]
    pairing.PairSource.take_flush = flush  # type: ignore[method-assign]


def cap_by_what_the_process_saw() -> None:
    """The cap on cells counts every cell that this process ever held, not those of the bucket."""
    seen: set[buckets.CellKey] = set()
    place = buckets.Bucket.place

    def placed(self: buckets.Bucket, key: buckets.CellKey, capacity: int) -> int | None:
        if key not in seen and len(seen) >= capacity:
            return None
        seen.add(key)
        return place(self, key, 1 << 30)

    buckets.Bucket.place = placed  # type: ignore[method-assign]


def read_uncommitted() -> None:
    """What Faust does by itself: aborted records are read like any other."""
    transport.isolation = lambda _kafka: "read_uncommitted"


def fence_nobody() -> None:
    """Every gate process is a producer of its own: a frozen one goes on writing beside its successor."""
    start = gate_writer.AIOKafkaProducer

    def producer(**options: Any) -> Any:
        return start(**{**options, "transactional_id": f"{options['transactional_id']}-{os.getpid()}"})

    gate_writer.AIOKafkaProducer = producer  # type: ignore[misc, assignment]


DEFECTS: Final[dict[str, Callable[[], None]]] = {
    "commit_at_the_read_position": commit_at_the_read_position,
    "commit_at_the_oldest_waiting_half": commit_at_the_oldest_waiting_half,
    "cap_by_what_the_process_saw": cap_by_what_the_process_saw,
    "read_uncommitted": read_uncommitted,
    "fence_nobody": fence_nobody,
}


def main() -> None:
    """Break this process, then be the worker."""
    defect, kind = sys.argv[1:]
    DEFECTS[defect]()
    from pipeline.cli.main import main as klaxon

    sys.argv = ["klaxon", "worker", kind]
    klaxon()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
