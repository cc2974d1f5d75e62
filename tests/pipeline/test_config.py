"""One file and the environment become frozen objects; every mistake names its place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Struct

from pipeline.config import SECTIONS, Config, ConfigError, load_config

NOT_ALONE = {"username", "password", "password_file", "ca_file", "certificate_file"} | {
    "key_file", "key_password", "key_password_file",
}  # fmt: skip
"""Settings of the connection to Kafka that are refused without the one they belong to (test_security.py)."""


def file_with(folder: Path, text: str) -> str:
    path = folder / "klaxon.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_without_file_or_variables() -> None:
    assert load_config(None, {}) == Config()


def test_file_then_variable_over_it(tmp_path: Path) -> None:
    path = file_with(tmp_path, "kafka:\n  bootstrap: a:1\n  partitions: 8\ncontent: {lateness_s: 1}\n")
    config = load_config(path, {"KLAXON_KAFKA_BOOTSTRAP": "b:2", "KLAXON_KAFKA_TRANSACTIONS": "false"})
    assert config.kafka.bootstrap == "b:2"
    assert config.kafka.partitions == 8
    assert config.kafka.transactions is False
    assert config.content.lateness_s == 1


def test_the_file_may_be_named_by_variable(tmp_path: Path) -> None:
    path = file_with(tmp_path, "router:\n  name: edge\n")
    assert load_config(None, {"KLAXON_CONFIG": path}).router.name == "edge"


def test_every_value_has_a_variable(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("x")
    for section, keys in SECTIONS.items():
        for key in keys:
            value = getattr(getattr(Config(), section), key)
            if (section == "kafka" and key in NOT_ALONE) or isinstance(value, Struct | tuple):
                continue
            text = str(secret) if key.endswith("_file") else "http://x"
            if value is not None:
                text = str(value).lower() if isinstance(value, bool) else str(value)
            load_config(None, {f"KLAXON_{section}_{key}".upper(): text})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "kafka:\n  bootstrap: x:1\ncontent:\n  latenes_s: 3\n",
            ":4: unknown key content.latenes_s; did you mean 'lateness_s'?",
        ),
        ("kafak: {}\n", ":1: unknown section 'kafak'; did you mean 'kafka'?"),
        ("content:\n  lateness_s: soon\n", ":2: content.lateness_s: Expected `int`"),
        ("content:\n\n  lateness_s: 0\n", ":3: content.lateness_s: Expected `int` >= 1"),
        ("kafka: 3\n", ":1: kafka holds keys"),
        ("- a\n", ":1: a mapping of sections"),
        ("kafka: {bootstrap: [}\n", ":1:"),
        ("kafka:\n  partitions: 1\n  partitions: 2\n", ":3: 'partitions' stands twice"),
        ("clickhouse:\n  database: a-b\n", ":2: clickhouse.database"),
        ("monitoring:\n  gate_port: 65536\n", ":2: monitoring.gate_port: Expected `int` <= 65535"),
        ("monitoring:\n  port: 9400\n", ":2: unknown key monitoring.port"),
        ("logging:\n  format: xml\n", ":2: logging.format"),
    ],
)
def test_a_mistake_in_the_file_names_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = file_with(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert told in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("KLAXON_KAFKA_BOOTSTRP", "x", "did you mean 'KLAXON_KAFKA_BOOTSTRAP'?"),
        ("KLAXON_CONTENT_LATENESS_S", "abc", "variable KLAXON_CONTENT_LATENESS_S"),
        ("KLAXON_KAFKA_TRANSACTIONS", "maybe", "variable KLAXON_KAFKA_TRANSACTIONS"),
        ("KLAXON_MONITORING_PAIR_PORT", "-1", "variable KLAXON_MONITORING_PAIR_PORT"),
    ],
)
def test_a_mistaken_variable_is_named(variable: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match="KLAXON_") as caught:
        load_config(None, {variable: value})
    assert told in str(caught.value)


def test_an_absent_or_binary_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / "none.yaml"), {})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(str(binary), {})


@pytest.mark.parametrize(("session_ms", "rebalance_ms"), [(150_001, 30_000), (25_001, 5_000)])
def test_heartbeats_that_come_after_every_rebalance_are_refused(
    tmp_path: Path, session_ms: int, rebalance_ms: int
) -> None:
    """A fifth of the session timeout is a heartbeat's time: at the rebalance timeout it comes in time."""
    text = f"kafka:\n  rebalance_timeout_ms: {rebalance_ms}\n  session_timeout_ms: %d\n"
    assert load_config(file_with(tmp_path, text % (session_ms - 1)), {}).kafka.session_timeout_ms
    with pytest.raises(ConfigError) as caught:
        load_config(file_with(tmp_path, text % session_ms), {})
    assert ":3: kafka.session_timeout_ms: " in str(caught.value)
    assert f"set at most {5 * rebalance_ms}, or raise kafka.rebalance_timeout_ms" in str(caught.value)
