"""docker-compose.yml, checked without a Docker engine: what it names exists, and its settings are known."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pipeline.cli.main import COMMANDS
from pipeline.config import Config, load_config
from tests.conftest import REPOSITORY

COMPOSE = REPOSITORY / "docker-compose.yml"
PINNED = re.compile(r"^[a-z0-9./-]+:v?\d+(\.\d+){2,}([.-][a-z0-9.]+)*$")


def services(text: str | None = None) -> dict[str, dict[str, Any]]:
    document = yaml.safe_load(text if text is not None else COMPOSE.read_text())
    return dict(document["services"])


def ours() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services().items() if "build" in service}


def faults_of(composed: dict[str, dict[str, Any]]) -> list[str]:
    """Everything a reader of the file would stumble over."""
    faults = []
    for name, service in composed.items():
        if not PINNED.match(service["image"]):
            faults.append(f"{name}: image {service['image']} is not pinned to a full version")
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("./") and not (REPOSITORY / source).is_file():
                faults.append(f"{name}: mounts {source}, which does not exist")
        for needed in service.get("depends_on", {}):
            if needed not in composed:
                faults.append(f"{name}: depends on {needed}, which is no service")
    return faults


def test_images_are_pinned_and_mounts_exist() -> None:
    assert faults_of(services()) == []


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ("apache/kafka:4.1.1", "apache/kafka:latest", "not pinned"),
        ("apache/kafka:4.1.1", "apache/kafka", "not pinned"),
        ("./infra/klaxon.yaml:", "./infra/none.yaml:", "does not exist"),
        ("      clickhouse:\n        condition", "      clickhose:\n        condition", "no service"),
    ],
)
def test_the_check_sees_what_it_is_for(good: str, bad: str, told: str) -> None:
    text = COMPOSE.read_text()
    assert good in text
    assert any(told in fault for fault in faults_of(services(text.replace(good, bad))))


def test_all_four_workers_and_a_router_are_there() -> None:
    commands = [tuple(service.get("command", ())) for service in ours().values()]
    for worker in ("measure", "pair", "gate", "archive"):
        assert ("worker", worker) in commands
    assert ("router",) in commands
    assert ("topics", "create") in commands
    assert ("migrate",) in commands
    assert ("keys", "create", "--if-absent") in commands
    assert all(command[0] in COMMANDS for command in commands)


def test_only_the_gate_holds_private_keys() -> None:
    mounts = {name: service["volumes"] for name, service in ours().items()}
    holders = {name for name, found in mounts.items() if any(one.startswith("keys:") for one in found)}
    assert holders == {"keys", "gate"}
    for name in ("gate", "router"):
        assert "trust:/var/lib/klaxon/trust:ro" in ours()[name]["volumes"]
        assert ours()[name]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}


def test_variables_are_known_and_give_the_file_other_addresses() -> None:
    base = load_config(str(REPOSITORY / "infra" / "klaxon.yaml"), {})
    for name, service in ours().items():
        variables = {key: str(value) for key, value in service["environment"].items()}
        assert variables.pop("KLAXON_CONFIG") == "/etc/klaxon/klaxon.yaml", name
        config = load_config(str(REPOSITORY / "infra" / "klaxon.yaml"), variables)
        assert config.kafka.bootstrap == "kafka:9092"
        assert config.content == base.content
        assert config.gate == base.gate


def test_the_configuration_file_states_the_defaults() -> None:
    assert load_config(str(REPOSITORY / "infra" / "klaxon.yaml"), {}) == Config()


def test_what_the_image_copies_exists() -> None:
    for line in (REPOSITORY / "infra" / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (REPOSITORY / source).exists(), source


def test_every_python_dependency_in_the_image_is_locked_with_a_hash() -> None:
    installs = re.findall(r"pip install ([^\n&]+)", (REPOSITORY / "infra/docker/Dockerfile").read_text())
    *packages, ourselves = installs
    assert "--no-deps --no-build-isolation ." in ourselves
    for install, least in zip(packages, (20, 3), strict=True):
        assert "--require-hashes -r infra/locks/" in install
        locked = (REPOSITORY / install.split("-r ")[1].split()[0]).read_text()
        blocks = re.split(r"^(?=\S+==)", locked, flags=re.MULTILINE)[1:]
        assert len(blocks) > least
        for block in blocks:
            assert "--hash=sha256:" in block, block.splitlines()[0]
