"""Worker "pair": mirrored answers matched, scored and counted in one-second buckets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from pipeline.config import Config
from pipeline.core.divergence import KERNEL_SAID
from pipeline.core.pairing import PairSource, prepare_together
from pipeline.core.table import CellTable
from pipeline.workers.content import content_settings
from pipeline.workers.faults import fault, is_armed
from pipeline.workers.runner import WorkerSpec
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import Source, SourceKind
from pipeline.workers.transport import Link
from schemas.codec import decode_logits
from schemas.plain import Log, Plain
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.worker")

READS: Final = (Topic.LOGITS,)
ROWS_EVERY_US: Final = 250_000
"""Of log time, between two records of scored pairs of a partition."""
WRITES: Final = (Topic.BUCKETS, Topic.PARTIALS, Topic.PAIRS, Topic.DEAD_LETTER)


def pair(config: Config) -> WorkerSpec:
    """The worker, configured."""
    settings = content_settings(config.content)

    def observe(source: Source) -> None:
        if is_armed("half_waiting") and source.gauges()["oldest_wait_us"] > settings.join_timeout_us // 2:
            fault("half_waiting")

    def prepare(sources: Sequence[Source], waiting: float) -> None:
        prepare_together([source for source in sources if isinstance(source, PairSource)], waiting)

    def make(link: Link, _counts: Mapping[Topic, int]) -> SourceWorker:
        table = CellTable()

        def make_source(topic: Topic, partition: int) -> PairSource:
            return PairSource(topic, partition, settings, rows_every_us=ROWS_EVERY_US, table=table)

        kinds = {Topic.LOGITS: SourceKind(decode_logits, make_source, observe, prepare)}
        log.info("pair: scores by %s", Plain(KERNEL_SAID))
        return SourceWorker(link, config, kinds)

    return WorkerSpec("pair", reads=READS, needs=WRITES, make=make)
