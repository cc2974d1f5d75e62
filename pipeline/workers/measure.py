"""Worker "measure": requests and telemetry into one-second buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pipeline.config import Config
from pipeline.core.measuring import MeasureSource, prepare_together
from pipeline.core.table import CellTable
from pipeline.workers.content import content_settings
from pipeline.workers.runner import WorkerSpec
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import Source, SourceKind
from pipeline.workers.transport import Link
from schemas.codec import decode_requests, decode_telemetry
from schemas.topics import Topic

READS: Final = (Topic.REQUESTS, Topic.TELEMETRY)
WRITES: Final = (Topic.BUCKETS, Topic.PARTIALS, Topic.DEAD_LETTER)


def measure(config: Config) -> WorkerSpec:
    """The worker, configured."""
    settings = content_settings(config.content)

    def prepare(sources: Sequence[Source], waiting: float) -> None:
        prepare_together([source for source in sources if isinstance(source, MeasureSource)], waiting)

    def make(link: Link, _counts: Mapping[Topic, int]) -> SourceWorker:
        tables = {topic: CellTable() for topic in READS}

        def make_source(topic: Topic, partition: int) -> MeasureSource:
            return MeasureSource(topic, partition, settings, tables[topic])

        kinds = {
            Topic.REQUESTS: SourceKind(decode_requests, make_source, prepare=prepare),
            Topic.TELEMETRY: SourceKind(decode_telemetry, make_source, prepare=prepare),
        }
        return SourceWorker(link, config, kinds)

    return WorkerSpec("measure", reads=READS, needs=WRITES, make=make)
