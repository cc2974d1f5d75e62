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


def test_each_process_gets_the_clickhouse_account_it_needs_and_no_other() -> None:
    held = {
        name: {key: value for key, value in service["environment"].items() if "CLICKHOUSE_" in key}
        for name, service in ours().items()
    }
    for name, variables in held.items():
        assert variables.pop("KLAXON_CLICKHOUSE_DSN") == "http://clickhouse:8123", name
    accounts = {
        name: variables["KLAXON_CLICKHOUSE_USERNAME"] for name, variables in held.items() if variables
    }
    assert accounts == {"migrate": "klaxon_migrator", "archive": "klaxon_writer"}
    for name, account in accounts.items():
        variable = account.removeprefix("klaxon_").upper()
        assert f"${{KLAXON_CLICKHOUSE_{variable}_PASSWORD:?" in held[name]["KLAXON_CLICKHOUSE_PASSWORD"]


def test_the_server_gets_the_accounts_and_hashes_alone() -> None:
    server = services()["clickhouse"]
    assert "./infra/clickhouse/users.xml:/etc/clickhouse-server/users.d/klaxon.xml:ro" in server["volumes"]
    wanted = set(re.findall(r'from_env="(\w+)"', (REPOSITORY / "infra/clickhouse/users.xml").read_text()))
    assert set(server["environment"]) == wanted
    assert all(name.endswith("_SHA256") for name in wanted)


def test_no_password_stands_in_the_file() -> None:
    for name, service in services().items():
        for key, value in service["environment"].items():
            if key.endswith(("_PASSWORD", "_SHA256")):
                assert str(value).startswith(f"${{{key}:?") or str(value).startswith("${KLAXON_"), (name, key)


def test_our_containers_may_write_nothing_and_gain_no_rights() -> None:
    for name, service in ours().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service, f"{name}: the image's user is the one"
        assert not service.get("privileged"), name
        writable = [mount for mount in service["volumes"] if not mount.endswith(":ro")]
        assert not writable or name == "keys", name


def test_the_configuration_file_states_the_defaults() -> None:
    assert load_config(str(REPOSITORY / "infra" / "klaxon.yaml"), {}) == Config()
