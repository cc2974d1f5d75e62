"""What the pair worker's core costs, part by part, without Kafka: `python -m tests.bench.core`.

The bench's backlog goes through decoding, reading and flushing as in a worker that is behind, in one thread.
A stop watch around each part takes its thread time without that of the parts inside. Flushes come after fixed
shares of the records, so two versions that say the same publish the same bytes: the digests tell.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from pipeline.config import ContentConfig
from pipeline.core import pairing
from pipeline.core.pair_rows import PairRows
from pipeline.core.pairing import PairSource
from pipeline.core.source import Flush, RecordMeta
from pipeline.core.table import CellTable
from pipeline.workers.content import content_settings
from pipeline.workers.memory import keep_freed_memory
from pipeline.workers.pair import ROWS_EVERY_US
from pipeline.workers.runner import GARBAGE_CHECK
from schemas.codec import decode_logits
from schemas.topics import Topic
from tests.bench.__main__ import OUT, shared_folder
from tests.bench.backlog import Out, read_backlog
from tests.bench.context import PAIRS, RESPONSES_PER_RECORD
from tests.bench.drain import GAP_US, LATENESS_US

PARTITIONS: Final = 4
ROUNDS: Final = 4
START_US: Final = 1_790_000_000_000_000
FLUSHED_AFTER: Final = (0.03, 0.36, 0.76, 0.89, 0.97, 1.0)
"""Shares of the backlog, as seen of a worker on Kafka: it begins with little, and ends with what is left."""


class Watch:
    """Thread time by part, in ns."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.spent_ns: Counter[str] = Counter()
        self._inside_ns = [0]

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed; what timed calls inside it take is theirs."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.thread_time_ns()
            self._inside_ns.append(0)
            made = call(*args, **kwargs)
            if isinstance(made, Iterator):
                made = list(made)
            took_ns = time.thread_time_ns() - began_ns
            self.spent_ns[part] += took_ns - self._inside_ns.pop()
            self._inside_ns[-1] += took_ns
            return made

        return timed

    def put_around(self, part: str, owner: type | ModuleType, *names: str) -> None:
        """Time these functions from here on."""
        for name in names:
            setattr(owner, name, self.around(part, getattr(owner, name)))


class Play:
    """Sources of all partitions, and what they published."""

    def __init__(self, watch: Watch) -> None:
        """They have read nothing."""
        settings, table = content_settings(ContentConfig()), CellTable()
        self._sources = [
            PairSource(Topic.LOGITS, number, settings, rows_every_us=ROWS_EVERY_US, table=table)
            for number in range(PARTITIONS)
        ]
        for source in self._sources:
            source.score = watch.around("scoring", source.score)
        self._decode = watch.around("decoding and validating", decode_logits)
        self._encode = watch.around("rows of scored pairs", msgspec.msgpack.encode)
        self._offsets = [0] * PARTITIONS
        self.digests = {kind: hashlib.sha256() for kind in ("finals", "fresh", "pairs")}

    def run(self, records: Sequence[Out]) -> None:
        """Read all of them, flushing now and then."""
        due = [round(share * len(records)) for share in FLUSHED_AFTER]
        flushed = 0
        for read, record in enumerate(records, start=1):
            # As it lies in memory when it was just fetched.
            value = bytes(bytearray(record.value))
            decoded = self._decode(value, record.content_type) if value else None
            meta = RecordMeta(self._offsets[record.partition], record.timestamp_ms * 1000, len(value))
            self._sources[record.partition].read(meta, decoded)
            self._offsets[record.partition] += 1
            if read in due:
                self._flush((len(records) - read) / (read - flushed))
                flushed = read

    def _flush(self, waiting: float) -> None:
        pairing.prepare_together(self._sources, waiting)
        for source in self._sources:
            self._note(source.take_flush(waiting=waiting))

    def _note(self, flush: Flush) -> None:
        published = {
            "finals": [record.value for record in flush.finals],
            "fresh": [record.value for record in flush.fresh],
            "pairs": [self._encode(batch) for batch in flush.pairs],
        }
        for kind, values in published.items():
            for value in values:
                self.digests[kind].update(value)


def events_file() -> Path:
    """The bench's pairs, made if they are not there yet."""
    path = OUT.parent / "bench" / f"pairs-{PAIRS}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        program = shared_folder() / "tools" / "peers" / "bare.py"
        subprocess.run([sys.executable, program, "make", path, str(PAIRS)], check=True)
    return path


def main() -> None:
    """Print µs of thread time per event: of every part the least of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.core", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="backlogs one after the other")
    rounds = parser.parse_args().rounds
    gc.freeze()
    gc.set_threshold(GARBAGE_CHECK)
    keep_freed_memory()
    watch = Watch()
    watch.put_around("joining", PairSource, "read")
    watch.put_around("adding to cells", pairing, "add_together")
    watch.put_around("labels, rows, evidence", pairing, "settle_together")
    watch.put_around("closing, encoding", PairSource, "take_flush")
    watch.put_around("closing, encoding", pairing, "close_all", "show_all")
    watch.put_around("rows of scored pairs", PairRows, "batches")
    backlog = read_backlog(
        events_file(), Topic.LOGITS, partitions=PARTITIONS, per_record=RESPONSES_PER_RECORD, most=2 * PAIRS
    )
    play, start_us = Play(watch), START_US
    least: dict[str, float] = {}
    for _ in range(rounds):
        records = [*backlog.records(start_us), *backlog.ticks(start_us, LATENESS_US)]
        start_us += backlog.last_us - backlog.first_us + GAP_US
        watch.spent_ns.clear()
        play.run(records)
        for part, spent_ns in watch.spent_ns.items():
            us = spent_ns / 1000 / backlog.events
            least[part] = min(us, least.get(part, us))
    for part, us in least.items():
        print(f"{part:24} {us:6.2f} µs an event")
    print(f"{'all':24} {sum(least.values()):6.2f}")
    for kind, digest in play.digests.items():
        print(f"{kind:24} {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
