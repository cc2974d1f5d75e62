"""How connections are protected is configured whole or refused, and no secret shows itself."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_type_hints

import click
import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from pipeline.cli.main import cli
from pipeline.config import Config, ConfigError, load_config
from pipeline.secret import Secret
from pipeline.tls import PAUSE_S, TRIES, TlsFileError, client_context
from pipeline.workers.broker import client_options, security_options
from pipeline.workers.transport import KlaxonApp
from tests.conftest import REPOSITORY
from tests.kafka.secure import Authority

CANARY = "canary-c0ffee"
SASL = {"KLAXON_KAFKA_SECURITY": "sasl_ssl", "KLAXON_KAFKA_USERNAME": "u", "KLAXON_KAFKA_PASSWORD": CANARY}
SSL = {"KLAXON_KAFKA_SECURITY": "ssl"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def refused(environment: Mapping[str, str], path: str | None = None) -> str:
    """What the configuration says to it; never the secret."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_sasl_without_tls_is_refused_unless_told_otherwise() -> None:
    plain = {**SASL, "KLAXON_KAFKA_SECURITY": "sasl_plaintext"}
    assert refused(plain).startswith("variable KLAXON_KAFKA_SECURITY: sasl_plaintext proves who we are")
    assert "set kafka.sasl_without_tls: true" in refused(plain)
    told = load_config(None, {**plain, "KLAXON_KAFKA_SASL_WITHOUT_TLS": "true"})
    assert client_options(told.kafka)["security_protocol"] == "SASL_PLAINTEXT"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"KLAXON_KAFKA_SECURITY": "tls"}, "KLAXON_KAFKA_SECURITY: Invalid enum value 'tls'"),
        ({**SSL, "KLAXON_KAFKA_PASSWORD": CANARY}, "KLAXON_KAFKA_PASSWORD: no use without SASL"),
        ({"KLAXON_KAFKA_USERNAME": "u"}, "KLAXON_KAFKA_USERNAME: no use without SASL"),
        (
            {"KLAXON_KAFKA_CA_FILE": "ca.pem"},
            "KLAXON_KAFKA_CA_FILE: no use without TLS: kafka.security is plain",
        ),
        ({"KLAXON_KAFKA_CERTIFICATE_FILE": "c.pem"}, "KLAXON_KAFKA_CERTIFICATE_FILE: no use without TLS"),
        ({"KLAXON_KAFKA_KEY_FILE": "c.pem"}, "KLAXON_KAFKA_KEY_FILE: no use without TLS"),
        ({"KLAXON_KAFKA_KEY_PASSWORD": CANARY}, "kafka.key_password: no use without TLS"),
        ({**SASL, "KLAXON_KAFKA_USERNAME": ""}, "KLAXON_KAFKA_SECURITY: sasl_ssl needs kafka.username"),
        ({**SASL, "KLAXON_KAFKA_PASSWORD": ""}, "sasl_ssl needs kafka.password or kafka.password_file"),
        ({**SASL, "KLAXON_KAFKA_PASSWORD_FILE": "p"}, "kafka.password is set, too; keep one"),
        (
            {**SASL, "KLAXON_KAFKA_SASL_MECHANISM": "GSSAPI"},
            "KLAXON_KAFKA_SASL_MECHANISM: Invalid enum value",
        ),
        (
            {**SSL, "KLAXON_KAFKA_CA_FILE": "/none"},
            "KLAXON_KAFKA_CA_FILE: /none cannot be read: No such file",
        ),
        ({**SSL, "KLAXON_KAFKA_CA_FILE": __file__}, "test_security.py holds no certificate in PEM"),
        ({**SSL, "KLAXON_KAFKA_KEY_FILE": __file__}, "KLAXON_KAFKA_KEY_FILE: a key without its certificate"),
        ({**SSL, "KLAXON_KAFKA_CERTIFICATE_FILE": __file__}, "KLAXON_KAFKA_CERTIFICATE_FILE: "),
    ],
)
def test_half_a_protection_is_refused(environment: dict[str, str], told: str) -> None:
    assert told in refused(environment).replace("variable KLAXON_KAFKA_KEY_PASSWORD:", "kafka.key_password:")


def test_a_password_comes_from_a_file_of_its_own(tmp_path: Path) -> None:
    (file := tmp_path / "password").write_text(f"{CANARY}\n")
    environment = {**SASL, "KLAXON_KAFKA_PASSWORD_FILE": str(file)}
    del environment["KLAXON_KAFKA_PASSWORD"]
    assert load_config(None, environment).kafka.password.reveal() == CANARY
    (tmp_path / "klaxon.yaml").write_text(
        f"kafka:\n  security: sasl_ssl\n  username: u\n  password_file: {file}\n"
        f"clickhouse:\n  password_file: {file}\n"
    )
    read = load_config(str(tmp_path / "klaxon.yaml"), {})
    assert (read.kafka.password, read.clickhouse.password) == (Secret(CANARY), Secret(CANARY))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (f"{CANARY}\nmore\n".encode(), "holds more than one line"),
        (CANARY.encode() * 10_000, "holds more than one line"),
        (b"\xff\xfe" + CANARY.encode(), "is not UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_password_is_named(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    said = refused({**SASL, "KLAXON_KAFKA_PASSWORD": "", "KLAXON_KAFKA_PASSWORD_FILE": str(file)})
    assert said == f"variable KLAXON_KAFKA_PASSWORD_FILE: {file} {told}" or told in said


def test_a_password_that_yaml_reads_as_a_number_is_no_password(tmp_path: Path) -> None:
    (file := tmp_path / "klaxon.yaml").write_text(
        "kafka:\n  security: sasl_ssl\n  username: u\n  password: 123456\n"
    )
    said = refused({}, str(file))
    assert said == f"{file}:4: kafka.password: Expected text; put it in quotes"


@pytest.mark.parametrize(
    "before", ["*", "!", "!!", "!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary é"]
)
def test_a_password_that_yaml_takes_for_something_else_is_not_quoted(tmp_path: Path, before: str) -> None:
    (file := tmp_path / "klaxon.yaml").write_text(f"kafka:\n  password: {before}{CANARY}\n")
    said = refused({}, str(file))
    assert said.startswith(f"{file}:2: ")
    assert CANARY not in said


def test_no_secret_shows_itself() -> None:
    secret, config = Secret(CANARY), load_config(None, {**SASL, "KLAXON_CLICKHOUSE_PASSWORD": CANARY})
    options = security_options(config.kafka)
    shown = [repr(secret), str(secret), f"{secret:>20}", f"{secret!r}", repr(config), str(config.kafka)]
    shown += [repr(KlaxonApp("g", config.kafka).conf.broker_credentials), repr(copy.copy(secret.__class__))]
    assert not [text for text in shown if CANARY in text]
    assert options["sasl_plain_password"] == CANARY
    for refuse in (msgspec.json.encode, msgspec.to_builtins, pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            refuse(config)
        assert CANARY not in str(caught.value)


def test_no_configuration_shows_a_secret() -> None:
    """Every setting that may hold one, by its type, and passwords in addresses."""
    config = Config()
    for section in Config.__struct_fields__:
        settings = getattr(config, section)
        held = {
            name: Secret(CANARY) for name, kind in get_type_hints(type(settings)).items() if kind is Secret
        }
        config = replace(config, **{section: replace(settings, **held)})
    assert [repr(config).count("Secret(***)"), CANARY in repr(config)] == [5, False]
    for dsn in (
        f"https://u:{CANARY}@ch:8443/x", f"http://:{CANARY}@ch", f"http://ch:8123?password={CANARY}&x=1",
        f"http://u:a/{CANARY}@[::1", f"http://ch?client_Token={CANARY}",
    ):  # fmt: skip
        archive = replace(config.clickhouse, dsn=dsn)
        whole = replace(config, clickhouse=archive)
        console = Console(file=io.StringIO(), width=10_000)
        console.print(whole)
        shown = [f(one) for f in (repr, str, format, ascii) for one in (archive, whole)]
        shown += [console.file.getvalue()]  # type: ignore[attr-defined]
        assert not [text for text in shown if CANARY in text], dsn
        assert all("***" in text and "ClickHouseConfig" in text for text in shown)


def _options(command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from _options(found)
    yield from (parameter.name or "" for parameter in command.params)


def test_no_command_takes_a_secret_as_an_argument() -> None:
    found = set(_options(cli))
    assert {"config_path", "as_json", "query"} <= found
    assert not {name for name in found if re.search("password|secret|token", name)}


def test_faust_and_our_own_clients_are_protected_alike(authority: Authority) -> None:
    scram = load_config(None, {**SASL, "KLAXON_KAFKA_CA_FILE": authority.file}).kafka
    holder = load_config(
        None,
        {
            **SSL,
            "KLAXON_KAFKA_CA_FILE": authority.file,
            "KLAXON_KAFKA_CERTIFICATE_FILE": authority.certificate("gate"),
        },
    ).kafka
    for kafka, protocol in ((scram, "SASL_SSL"), (holder, "SSL"), (Config().kafka, "PLAINTEXT")):
        ours, faust = security_options(kafka), KlaxonApp("g", kafka).conf.broker_credentials
        assert ours["security_protocol"] == protocol
        assert (faust is None) == (protocol == "PLAINTEXT")
        if faust is not None:
            assert faust.protocol.value == protocol
    assert KlaxonApp("g", scram).conf.broker_credentials.mechanism.value == "SCRAM-SHA-512"


def test_an_encrypted_key_opens_with_its_password_and_asks_nobody(
    authority: Authority, tmp_path: Path
) -> None:
    (file := tmp_path / "password").write_text(CANARY)
    held = {
        **SSL,
        "KLAXON_KAFKA_CERTIFICATE_FILE": authority.certificate("locked", password=CANARY),
        "KLAXON_KAFKA_KEY_PASSWORD_FILE": str(file),
    }
    assert load_config(None, held)
    file.write_text("wrong")
    assert "KLAXON_KAFKA_KEY_PASSWORD_FILE: it does not open" in refused(held)
    del held["KLAXON_KAFKA_KEY_PASSWORD_FILE"]
    assert "kafka.key_password: it does not open" in refused(held)


def test_a_key_of_another_certificate_is_named(authority: Authority) -> None:
    other = authority.certificate("other")
    held = {
        **SSL,
        "KLAXON_KAFKA_CERTIFICATE_FILE": authority.certificate("gate"),
        "KLAXON_KAFKA_KEY_FILE": other,
    }
    assert f"KLAXON_KAFKA_KEY_FILE: {other} does not belong to the certificate" in refused(held)


def test_a_certificate_may_be_renewed_at_any_moment(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL reads the file twice, certificate first: what is renewed in between does not fit, once."""
    held, pauses = tmp_path / "held.pem", []
    held.write_text(Path(authority.certificate("before")).read_text())
    renewed = tmp_path / "renewed.pem"
    renewed.write_text(Path(authority.certificate("after")).read_text())
    half = tmp_path / "half.pem"
    key, certificate = (re.findall(r"-----BEGIN.*?-----END [A-Z ]+-----\n", text.read_text(), re.DOTALL)
                        for text in (renewed, held))  # fmt: skip
    half.write_text(key[0] + certificate[1])
    half.replace(held)
    monkeypatch.setattr("pipeline.tls.time.sleep", lambda s: (pauses.append(s), renewed.replace(held)))
    assert client_context(None, str(held), None, Secret()) is not None
    assert pauses == [PAUSE_S]
    monkeypatch.setattr("pipeline.tls.time.sleep", pauses.append)
    half.write_text(key[0] + certificate[1])
    with pytest.raises(TlsFileError, match="does not belong"):
        client_context(None, str(half), None, Secret())
    assert pauses == [PAUSE_S] * TRIES


PLAIN = {"pipeline/cli/demo/observe.py", "pipeline/cli/demo/witness.py"}
"""Whose clients are for the broker of the demo alone, which knows neither TLS nor log-ins."""
CLIENT = re.compile(r"AIOKafka(Consumer|Producer|AdminClient|Client)")
PROTECTED = re.compile(r"\*\*(client_options\(|self\._settings\.security\b|self\._options\b)")


def test_every_client_is_made_with_the_configured_protection() -> None:
    made = 0
    for path in sorted(
        file for folder in ("pipeline", "agents") for file in (REPOSITORY / folder).rglob("*.py")
    ):
        if str(path.relative_to(REPOSITORY)) in PLAIN:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and CLIENT.fullmatch(ast.unparse(call.func)):
                assert PROTECTED.search(ast.unparse(call)), f"{path}:{call.lineno}"
                made += 1
    assert made >= 12
