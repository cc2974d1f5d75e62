"""Before a flush, all sources of a kind that are ours prepare together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipeline.config import Config
from pipeline.core.source import Flush
from pipeline.workers.records import Partition
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import Source, SourceKind
from pipeline.workers.transport import Link
from schemas.topics import Topic

FIRST, SECOND = Partition(Topic.LOGITS, 0), Partition(Topic.LOGITS, 1)


@dataclass
class Noting:
    """Stands for a core object that has nothing to say."""

    partition: int
    called: list[str]

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        self.called.append(f"flush {self.partition}")
        return Flush()


async def test_sources_prepare_together_before_each_is_flushed() -> None:
    called: list[str] = []

    def prepare(sources: Sequence[Source], waiting: float) -> None:
        called.append(f"prepare {[cast('Noting', source).partition for source in sources]} {waiting}")

    kind = SourceKind(
        lambda *_: cast("Any", None),
        lambda _, partition: cast("Any", Noting(partition, called)),
        prepare=prepare,
    )
    worker = SourceWorker(cast("Link", None), Config(), {Topic.LOGITS: kind})
    await worker.assigned(frozenset({FIRST, SECOND}))
    await worker._flush(waiting=0.5)
    assert called[0] in {"prepare [0, 1] 0.5", "prepare [1, 0] 0.5"}
    assert sorted(called[1:]) == ["flush 0", "flush 1"]
    called.clear()
    await worker.revoked(frozenset({FIRST}))
    await worker._flush(waiting=0.0)
    assert called == ["prepare [1] 0.0", "flush 1"]
