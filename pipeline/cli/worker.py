"""`klaxon worker measure | pair | gate | archive`: one worker in this process, until SIGTERM.

Each command imports its own part only: a gate needs no ClickHouse client, an archive no scoring.
"""

from __future__ import annotations

import click
from aiokafka.errors import KafkaError

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.monitoring.lines import set_up
from pipeline.workers.records import Partition
from pipeline.workers.runner import WorkerSpec, run_worker


@click.group(epilog="Example: klaxon worker measure --config klaxon.yaml")
def worker() -> None:
    """Run one of the four workers; stop it with SIGTERM.

    A worker waits for the services it needs, with back-off, as long as it takes. It exits with 0 after
    SIGTERM and with 1 after an error; start it again then: it resumes where it must. It exits with 2 when its
    configuration is wrong or the broker refuses it.
    """


@worker.command(epilog="Example: klaxon worker measure --config klaxon.yaml")
@config_option
def measure(config: Config) -> int:
    """Requests and telemetry into one-second buckets."""
    from pipeline.workers.measure import measure as spec

    return _run(spec(config), config)


@worker.command(epilog="Example: klaxon worker pair --config klaxon.yaml")
@config_option
def pair(config: Config) -> int:
    """Mirrored answers matched and scored."""
    from pipeline.workers.pair import pair as spec

    return _run(spec(config), config)


@worker.command(epilog="Example: klaxon worker gate --config klaxon.yaml")
@config_option
def gate(config: Config) -> int:
    """Roll-outs judged, directives written."""
    from pipeline.workers.gate import gate as spec

    try:
        made = spec(config)
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    return _run(made, config)


@worker.command(epilog="Example: klaxon worker archive --config klaxon.yaml")
@config_option
def archive(config: Config) -> int:
    """Everything into ClickHouse, exactly once."""
    from pipeline.cli.archive_store import archive_opener
    from pipeline.store.errors import StoreError
    from pipeline.workers.archive import archive as spec

    _log(config, "archive")
    try:
        with archive_opener(config) as opener:
            return run_worker(spec(config, opener), config)
    except StoreError as error:
        raise CommandError(str(error), Exit.USAGE) from None


def _run(spec: WorkerSpec, config: Config) -> int:
    _log(config, spec.name)
    return run_worker(spec, config)


def _log(config: Config, process: str) -> None:
    set_up(process, config.logging, typed=(Partition, KafkaError))
