"""The measurements by name, in the order in which they are made and printed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from tests.bench import against_bare
from tests.bench.archive import archive
from tests.bench.context import Context
from tests.bench.gate import gate
from tests.bench.gateway import gateway_rows
from tests.bench.kernel_rows import kernel
from tests.bench.memory import memory
from tests.bench.rows import Row
from tests.bench.scaling import scaling
from tests.bench.trips import trips
from tests.bench.windows import windows


@dataclass(frozen=True, slots=True)
class Local:
    """Measured in this process. `run` is told whether to be quick."""

    run: Callable[[bool], list[Row]]


@dataclass(frozen=True, slots=True)
class OnKafka:
    """Measured on Apache Kafka. `shared`: with events or programs of the shared folder."""

    run: Callable[[Context], Awaitable[list[Row]]]
    shared: bool = True


Measurement: TypeAlias = Local | OnKafka

MEASUREMENTS: Final[Mapping[str, Measurement]] = {
    "pair": OnKafka(against_bare.pair),
    "measure": OnKafka(against_bare.measure),
    "json": OnKafka(against_bare.json),
    "archive": OnKafka(archive),
    "trips": OnKafka(trips, shared=False),
    "scaling": OnKafka(scaling),
    "gateway": OnKafka(gateway_rows, shared=False),
    "memory": Local(memory),
    "kernel": Local(kernel),
    "gate": Local(gate),
    "windows": Local(windows),
}
