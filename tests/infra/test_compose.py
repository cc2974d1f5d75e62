"""docker-compose.yml, checked without a Docker engine: what it names exists, and its settings are known."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli.main import COMMANDS, cli
from pipeline.cli.notify import webhook_of
from pipeline.config import Config, ConfigError, MonitoringConfig, load_config, load_gateway_config
from pipeline.core.notification import NotificationError
from pipeline.monitoring.metrics import ALL
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


def asked_for_health() -> dict[str, tuple[list[str], int]]:
    """Command and port of each service's health check."""
    found = {}
    for name, service in ours().items():
        if check := service.get("healthcheck"):
            kind, *command = check["test"]
            assert kind == "CMD", name
            (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/healthz", command[-1])
            found[name] = (command, int(port))
    return found


def test_every_process_that_stays_is_asked_for_its_health() -> None:
    ports = MonitoringConfig()
    assert {name: port for name, (_, port) in asked_for_health().items()} == {
        name: ports.port_of(name) for name in ALL
    }


def health_check(port: int) -> int:
    """Exit code of the gate's, asked of this port."""
    (python, *rest), theirs = asked_for_health()["gate"]
    assert python == "python"
    command = [sys.executable, *(word.replace(str(theirs), str(port)) for word in rest)]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_health_check_fails_where_health_does(status: int, code: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        answering = threading.Thread(target=server.handle_request, daemon=True)
        answering.start()
        assert health_check(server.server_port) == code
        answering.join()


def test_a_health_check_fails_where_nobody_listens() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # held, and not listened on
        assert health_check(nobody.getsockname()[1]) == 1


def test_the_notifier_starts_only_where_it_is_asked_for() -> None:
    notify = ours()["notify"]
    assert notify["profiles"] == ["notify"]
    with pytest.raises(NotificationError, match="no webhook is configured: set notify"):
        webhook_of(Config().notify)
    assert notify["environment"]["KLAXON_NOTIFY_URL"] == "${KLAXON_NOTIFY_URL:-}"


def test_a_gateway_starts_only_where_it_is_asked_for_with_its_own_keys(tmp_path: Path) -> None:
    """With a file that names engines: keys are where `keys create` puts them, and nobody else has them."""
    making, gateway = ours()["gateway-keys"], ours()["gateway"]
    assert making["profiles"] == gateway["profiles"] == ["gateway"]
    assert making["environment"] == gateway["environment"]
    here = tmp_path / "gateway"
    variables = {
        key: str(value).replace("/var/lib/klaxon/gateway", str(here))
        for key, value in gateway["environment"].items()
    }
    pools = [
        {
            "arm": "baseline",
            "kind": "vllm",
            "model_version": "v1",
            "engines": [{"node": "n", "url": "http://n"}],
        }
    ]
    mine = yaml.safe_load((REPOSITORY / "infra" / "klaxon.yaml").read_text())
    variables["KLAXON_CONFIG"] = str(tmp_path / "mine.yaml")
    mine["gateway"] = {"rollout": "chat", "pools": pools}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    with pytest.raises(ConfigError, match=r"SIGNATURE_KEY_FILE.*cannot be read"):
        load_gateway_config(None, variables)
    made = CliRunner(env=variables).invoke(cli, making["command"])
    assert made.exit_code == 0, made.output
    assert load_gateway_config(None, variables).gateway.listen == "0.0.0.0"
    mounts = {name: service["volumes"] for name, service in ours().items()}
    own = "gateway-keys:"
    holders = {name for name, found in mounts.items() if any(one.startswith(own) for one in found)}
    assert holders == {"gateway-keys", "gateway"}
    assert "gateway-keys:/var/lib/klaxon/gateway:ro" in mounts["gateway"]


def test_only_the_gate_holds_private_keys() -> None:
    mounts = {name: service["volumes"] for name, service in ours().items()}
    holders = {name for name, found in mounts.items() if any(one.startswith("keys:") for one in found)}
    assert holders == {"keys", "gate"}
    for name in ("gate", "router", "gateway"):
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
            if key.endswith(("_PASSWORD", "_SHA256", "_SECRET", "_NOTIFY_URL")):
                assert str(value).startswith(f"${{{key}:") or str(value).startswith("${KLAXON_"), (name, key)


def test_our_containers_may_write_nothing_and_gain_no_rights() -> None:
    for name, service in ours().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service, f"{name}: the image's user is the one"
        assert not service.get("privileged"), name
        writable = [mount for mount in service["volumes"] if not mount.endswith(":ro")]
        assert not writable or name in ("keys", "gateway-keys"), name


def test_the_configuration_file_states_the_defaults() -> None:
    assert load_config(str(REPOSITORY / "infra" / "klaxon.yaml"), {}) == Config()
