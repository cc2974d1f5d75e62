"""Starts real brokers for tests: Apache Kafka from its jars, and the embedded one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.config import KafkaConfig, load_config
from pipeline.secret import Secret
from tests.conftest import REPOSITORY, required_or_skip
from tests.kafka import keys

KAFKA_SH = REPOSITORY / "infra" / "kafka" / "kafka.sh"
START_TIMEOUT_S = 240
"""Generous: the first start collects the jars."""


@dataclass(frozen=True)
class Broker:
    """A running broker: how this process and worker processes are configured for it."""

    config: KafkaConfig
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def bootstrap(self) -> str:
        """`host:port`."""
        return self.config.bootstrap


def broker_of(config: KafkaConfig) -> Broker:
    """The broker of this configuration, with the same configuration as `KLAXON_KAFKA_*` variables.

    Processes that are given these sign and verify, with the keys of the test run.
    """
    default = KafkaConfig()
    changed = {
        name: getattr(config, name)
        for name in KafkaConfig.__struct_fields__
        if getattr(config, name) != getattr(default, name)
    }
    variables = {f"KLAXON_KAFKA_{name.upper()}": _text(value) for name, value in changed.items()}
    return Broker(config, keys.settings() | variables)


def _text(value: object) -> str:
    if isinstance(value, Secret):
        return value.reveal()
    return str(value).lower() if isinstance(value, bool) else str(value)


SHORT_LIVED = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""For a Java that lives for minutes: compiling for hours costs more than it gains."""


@contextmanager
def apache_kafka(folder: Path, *, measured: bool = False) -> Iterator[Broker]:
    """One broker with its data in `folder`; short sessions. Without Java: skips, in CI fails.

    `measured`: its Java runs as it comes, as where speed is measured.
    """
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            required_or_skip(f"{program} is not installed: Apache Kafka's jars need Java 17 and Maven 3.8")
    with none_left(folder):
        bootstrap = kafka_sh("start", folder, {} if measured else {"KAFKA_JVM": SHORT_LIVED})
        try:
            yield broker_of(
                KafkaConfig(
                    bootstrap=bootstrap,
                    replication=1,
                    partitions=2,
                    session_timeout_ms=6_000,
                    rebalance_timeout_ms=6_000,
                )
            )
        finally:
            kafka_sh("stop", folder)


@contextmanager
def none_left(*folders: Path) -> Iterator[None]:
    """What brokers run in these folders are killed when the body ends, or this process, however it does."""
    command = ["bash", str(KAFKA_SH), "guard", *map(str, folders)]
    # A session of its own: a signal to all processes of the test run does not reach it.
    # Left in whatever way, `with` ends its input and waits for it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield


@contextmanager
def tansu(log: Path) -> Iterator[Broker]:
    """The embedded broker, with nothing in it. Skips (fails in CI) when its package is not installed."""
    embedded = pytest.importorskip("pipeline.cli.demo.embedded_broker")
    try:
        embedded.broker_binary()
    except embedded.EmbeddedBrokerError as error:
        required_or_skip(str(error))
    with embedded.embedded_broker(log, START_TIMEOUT_S) as bootstrap:
        settings = {
            **keys.settings(),
            **embedded.KAFKA_SETTINGS,
            "KLAXON_KAFKA_BOOTSTRAP": bootstrap,
            "KLAXON_KAFKA_PARTITIONS": "2",
        }
        yield Broker(load_config(None, settings).kafka, settings)


def kafka_sh(
    action: str, folder: Path, variables: Mapping[str, str] | None = None, *, arguments: Sequence[str] = ()
) -> str:
    """Run `infra/kafka/kafka.sh`; returns its answer. Raises RuntimeError with what it said; blocks."""
    # To files, not pipes: the broker it starts would keep a pipe open. What it prints is its answer; Maven
    # and the shell speak on standard error, whatever they are told.
    out, err = (folder.parent / f"{folder.name}-{action}.{kind}" for kind in ("out", "err"))
    with out.open("wb") as answer, err.open("wb") as said:
        done = subprocess.run(
            ["bash", str(KAFKA_SH), action, str(folder), *arguments],
            stdout=answer,
            stderr=said,
            timeout=START_TIMEOUT_S,
            env={**os.environ, **(variables or {})},
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"kafka.sh {action} failed:\n{err.read_text()}{out.read_text()}")
    return out.read_text().strip()
