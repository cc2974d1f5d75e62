"""`klaxon worker measure | pair | gate | archive`: one worker in this process, until SIGTERM."""

from __future__ import annotations

import logging
import sys
from typing import Final

import click

from pipeline.cli.options import config_option
from pipeline.config import Config
from pipeline.workers.transport import WorkerSpec, run_worker

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.group()
def worker() -> None:
    """Run one of the four workers; stop it with SIGTERM.

    A worker waits for the broker and its topics, with back-off, as long as it takes.
    Example: klaxon worker measure --config klaxon.yaml
    """


@worker.command()
@config_option
def measure(config: Config) -> int:
    """Requests and telemetry into one-second buckets. Example: klaxon worker measure"""
    from pipeline.workers.measure import measure as spec  # each command loads only its own part

    return _run(spec(config), config)


@worker.command()
@config_option
def pair(config: Config) -> int:
    """Match mirrored answers and score them. Example: klaxon worker pair"""
    from pipeline.workers.pair import pair as spec

    return _run(spec(config), config)


@worker.command()
@config_option
def gate(config: Config) -> int:
    """Judge roll-outs and write directives. Example: klaxon worker gate"""
    from pipeline.workers.gate import gate as spec

    return _run(spec(config), config)


def _run(spec: WorkerSpec, config: Config) -> int:
    log_to_standard_error()
    return run_worker(spec, config.kafka)


def log_to_standard_error() -> None:
    """Ours from INFO up, everybody else's from WARNING up."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("klaxon").setLevel(logging.INFO)
