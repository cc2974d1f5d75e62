"""Configuration: one YAML file plus `KLAXON_*` variables, resolved once into frozen objects.

Later code never reads the environment. A variable `KLAXON_<SECTION>_<KEY>` overrides the file's
`section: {key: …}`. An unknown section or key is an error that names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from agents.gateway.settings import Fault, GatewaySettings, faults
from pipeline.config_file import ConfigError as ConfigError
from pipeline.config_file import overlay, place_of, read_file
from pipeline.gateway_config import missing_files, named
from pipeline.secret import Secret, SecretFileError, read_secret_file, without_password
from pipeline.tls import TlsFileError, client_context

HEARTBEATS_PER_SESSION: Final = 5
"""A worker's heartbeats in its session timeout."""

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[int, Meta(ge=1, le=86_400)]
Port = Annotated[int, Meta(ge=0, le=65_535)]


class KafkaConfig(Struct, frozen=True, kw_only=True):
    """The broker and how groups behave on it."""

    bootstrap: str = "127.0.0.1:9092"
    security: Literal["plaintext", "ssl", "sasl_ssl", "sasl_plaintext"] = "plaintext"
    """`ssl`: TLS, and who we are by certificate, if at all; `sasl_ssl`: TLS, and who we are by password."""
    sasl_without_tls: bool = False
    """Without it `sasl_plaintext` is refused: whoever listens could then act as this process."""
    sasl_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    username: str = ""
    password: Secret = Secret()
    password_file: str | None = None
    """Instead of `password`: a file with nothing else in it."""
    ca_file: str | None = None
    """Authorities that may certify brokers, PEM; absent: the system's."""
    certificate_file: str | None = None
    """Who we are to brokers that ask for a certificate: it and its chain, PEM."""
    key_file: str | None = None
    """Its private key, PEM; absent: in `certificate_file`, too."""
    key_password: Secret = Secret()
    key_password_file: str | None = None
    transactions: bool = True
    """False only on the embedded broker, which has none: one gate process, promises 1 and 6 not claimed."""
    append_time: bool = True
    """False only on the embedded broker, which keeps producers' times: log time is then their maximum."""
    session_timeout_ms: Positive = 15_000
    rebalance_timeout_ms: Positive = 30_000
    fetch_wait_ms: Positive = 50
    partitions: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Partitions of the input topics, for `klaxon topics create`; fixed from then on."""
    replication: Annotated[int, Meta(ge=1, le=9)] = 3
    connect_timeout_s: Seconds = 30
    """How long a command waits for the broker before it gives up with exit code 3."""


Principal = Annotated[str, Meta(pattern="^[A-Za-z]+:.+$")]


class PrincipalsConfig(Struct, frozen=True, kw_only=True):
    """Who each role of the table of rights is: `User:NAME`, or what brokers make of a certificate."""

    measure: Principal = "User:klaxon-measure"
    pair: Principal = "User:klaxon-pair"
    gate: Principal = "User:klaxon-gate"
    archive: Principal = "User:klaxon-archive"
    notify: Principal = "User:klaxon-notify"
    replay: Principal = "User:klaxon-replay"
    operator: Principal = "User:klaxon-operator"
    console: Principal = "User:klaxon-console"
    gateway: Principal = "User:klaxon-gateway"
    publisher: Principal = "User:klaxon-publisher"
    node_agent: Principal = "User:klaxon-node-agent"
    router: Principal = "User:klaxon-router"


class ClickHouseConfig(Struct, frozen=True, kw_only=True):
    """Where the archive is: `http://host:8123`, or `chdb:///folder` for the engine in process."""

    dsn: str = "http://127.0.0.1:8123"
    database: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")] = "klaxon"
    username: str = "default"
    password: Secret = Secret()
    password_file: str | None = None
    """Instead of `password`: a file with nothing else in it."""
    timeout_s: Seconds = 120
    """How long a server may keep silent in an answer before the archive gives it up and tries again."""

    def __repr__(self) -> str:
        return f"ClickHouseConfig({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [
            (name, without_password(self.dsn) if name == "dsn" else getattr(self, name))
            for name in self.__struct_fields__
        ]


class ContentConfig(Struct, frozen=True, kw_only=True):
    """What decides the content of buckets. Equal on all workers: a bucket's settings hash covers it."""

    lateness_s: Seconds = 15
    join_timeout_s: Seconds = 60
    cells_per_bucket: Annotated[int, Meta(ge=16, le=65_536)] = 2_048


class GateConfig(Struct, frozen=True, kw_only=True):
    """Leases and the pace of judgement."""

    lease_s: Seconds = 15
    renew_s: Seconds = 5
    dead_man_s: Seconds = 60
    blind_after_s: Seconds = 45
    fresh_interval_ms: Positive = 50


class PolicyConfig(Struct, frozen=True, kw_only=True):
    """The policy of roll-outs whose spec carries none."""

    file: str | None = None
    """Path of a policy file; absent: the shipped default policy."""


class ArchiveConfig(Struct, frozen=True, kw_only=True):
    """How the archive worker cuts blocks, and where it answers read-only queries."""

    block_rows: Annotated[int, Meta(ge=1, le=100_000)] = 100_000
    block_bytes: Annotated[int, Meta(ge=1, le=64 << 20)] = 64 << 20
    block_age_ms: Positive = 10_000
    query_listen: str | None = None
    """`host:port` of the read-only query endpoint (embedded ClickHouse only); absent: none."""


class RouterConfig(Struct, frozen=True, kw_only=True):
    """The router that follows the control topic."""

    name: str = "router-1"


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """Every kind of worker."""

    gauges_every_s: Annotated[int, Meta(ge=0)] = 60
    """How often a worker logs its gauges; 0: never."""


class MonitoringConfig(Struct, frozen=True, kw_only=True):
    """Where a process answers `/metrics`, `/healthz` and `/readyz`; 0: any free port, null: nowhere."""

    host: str = "127.0.0.1"
    """Anything but loopback shows it to whoever reaches that address: there is no login."""
    measure_port: Port | None = 9401
    pair_port: Port | None = 9402
    gate_port: Port | None = 9403
    archive_port: Port | None = 9404
    router_port: Port | None = 9405
    notify_port: Port | None = 9406
    gateway_port: Port | None = 9407

    def port_of(self, process: str) -> int | None:
        """Of one kind of process; None: it does not listen."""
        port: int | None = getattr(self, f"{process}_port", None)
        return port


class LoggingConfig(Struct, frozen=True, kw_only=True):
    """What workers and routers say on standard error."""

    format: Literal["human", "json"] = "human"
    """`json`: one object a line."""


_KIND: Final = "trip|gap|pause|eject|narrow|hold|close|step|promote|advise|reassert|refused|command"


class NotifyConfig(Struct, frozen=True, kw_only=True):
    """The webhook of `klaxon notify`. Its url and secrets are never logged."""

    url: Secret = Secret()
    """`https://…`; http only to this machine, or where allow_http says so."""
    secret_file: str | None = None
    """File with `whsec_BASE64`, one a line: with two, notifications carry both signatures."""
    secret: Secret = Secret()
    """The same as a value, for KLAXON_NOTIFY_SECRET."""
    kinds: Annotated[str, Meta(pattern=f"^({_KIND})(,({_KIND}))*$")] = "trip,gap"
    """Kinds of decisions to tell, separated by commas."""
    timeout_s: Annotated[int, Meta(ge=1, le=120)] = 10
    give_up_s: Annotated[int, Meta(ge=1)] = 86_400
    """How long one notification is sent again before it is left out."""
    allow_http: bool = False


class DeadLetterConfig(Struct, frozen=True, kw_only=True):
    """Dead letters hold no payload unless asked for: it may be personal."""

    payload: bool = False


class SignaturesConfig(Struct, frozen=True, kw_only=True):
    """Signed directives and commands: who signs with which key, and which keys are trusted."""

    required: bool = True
    """False: nothing is verified, and whoever may write the topics is obeyed."""
    trust_file: str | None = None
    """Public keys, for gates and routers."""
    directive_key_file: str | None = None
    """The gate's private key."""
    command_key_file: str | None = None
    """The private key of an operator's commands."""
    command_age_s: Seconds = 3_600
    """A command older than this is refused: the gate remembers only so many ids."""


class Config(Struct, frozen=True, kw_only=True):
    """Everything configurable, resolved."""

    kafka: KafkaConfig = KafkaConfig()
    principals: PrincipalsConfig = PrincipalsConfig()
    clickhouse: ClickHouseConfig = ClickHouseConfig()
    content: ContentConfig = ContentConfig()
    gate: GateConfig = GateConfig()
    policy: PolicyConfig = PolicyConfig()
    archive: ArchiveConfig = ArchiveConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    logging: LoggingConfig = LoggingConfig()
    dead_letter: DeadLetterConfig = DeadLetterConfig()
    notify: NotifyConfig = NotifyConfig()
    signatures: SignaturesConfig = SignaturesConfig()
    gateway: GatewaySettings = GatewaySettings()


def _keys(section: str) -> tuple[str, ...]:
    return tuple(type(getattr(Config(), section)).__struct_fields__)


SECRETS: Final = (("kafka", "password"), ("kafka", "key_password"), ("clickhouse", "password"))
"""Section and key; each may also stand in a file that `<key>_file` names."""
SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {name: _keys(name) for name in Config.__struct_fields__}


def load_config(path: str | None, environ: Mapping[str, str]) -> Config:
    """Resolve file and environment. `path` None: `KLAXON_CONFIG`, else defaults. Raises ConfigError.

    Reads the file; blocks.
    """
    return _load(path, environ, for_gateway=False)


def load_gateway_config(path: str | None, environ: Mapping[str, str]) -> Config:
    """The same for `klaxon gateway`, whose section must be there, with every file that it names."""
    return _load(path, environ, for_gateway=True)


def _load(path: str | None, environ: Mapping[str, str], *, for_gateway: bool) -> Config:
    path = path or environ.get("KLAXON_CONFIG")
    values, document = read_file(path, SECTIONS)
    needed = for_gateway or "gateway" in values
    from_environment = overlay(values, environ, SECTIONS)
    try:
        _read_secrets(values)
        config = msgspec.convert(values, Config, strict=False, dec_hook=_secret)
        _check_security(config.kafka)
        _check_times(config.kafka)
        if needed:
            _refuse(faults(config.gateway))
            _check_copies(config)
        if for_gateway:
            _refuse(missing_files(config.gateway))
    except (msgspec.ValidationError, _SettingError) as error:
        raise ConfigError(place_of(str(error), path, document, from_environment)) from None
    return config


def _check_copies(config: Config) -> None:
    """A copy that ends after the join timeout finds no pair any more: it would cost and prove nothing."""
    most_s, told_s = config.content.join_timeout_s, config.gateway.mirror.timeout_s
    if told_s > most_s:
        raise _SettingError(
            "gateway",
            "mirror.timeout_s",
            f"after {told_s:g} s a copy finds no pair any more: content.join_timeout_s is {most_s}; "
            "set at most that",
        )


def _refuse(found: Iterable[Fault]) -> None:
    """The first fault of the gateway's section, if there is one."""
    for fault in found:
        raise _SettingError("gateway", named(fault.path), fault.message)


class _SettingError(Exception):
    """A setting that fits its type and yet cannot be; the text ends with its path, as msgspec's do."""

    def __init__(self, section: str, key: str, message: str) -> None:
        super().__init__(f"{message} - at `$.{section}.{key}`")


def _secret(wanted: type, value: object) -> Secret:
    if isinstance(value, Secret):
        return value
    if wanted is not Secret or not isinstance(value, str):
        raise ValueError("Expected text; put it in quotes")
    return Secret(value)


def _read_secrets(values: dict[str, dict[str, object]]) -> None:
    """Put the content of every `…_file` that holds a secret in that secret's place."""
    for section, secret in SECRETS:
        content = values.get(section, {})
        path = content.get(f"{secret}_file")
        if not isinstance(path, str):
            continue
        if content.get(secret):
            raise _SettingError(section, f"{secret}_file", f"{section}.{secret} is set, too; keep one")
        try:
            content[secret] = read_secret_file(path)
        except SecretFileError as error:
            raise _SettingError(section, f"{secret}_file", str(error)) from None


def _check_times(kafka: KafkaConfig) -> None:
    """Heartbeats leave every fifth of the session timeout, and only by their answers a member learns that its
    group joins anew: one that learns it after the rebalance timeout is thrown out, each time."""
    most_ms = HEARTBEATS_PER_SESSION * kafka.rebalance_timeout_ms
    if kafka.session_timeout_ms > most_ms:
        every_ms = kafka.session_timeout_ms / HEARTBEATS_PER_SESSION
        raise _SettingError(
            "kafka",
            "session_timeout_ms",
            f"{kafka.session_timeout_ms} ms send a heartbeat every {every_ms:g} ms, when a rebalance of "
            f"{kafka.rebalance_timeout_ms} ms is over; set at most {most_ms}, or raise "
            "kafka.rebalance_timeout_ms",
        )


def _check_security(kafka: KafkaConfig) -> None:
    """Refuse what does not protect as it says."""
    tls = kafka.security in ("ssl", "sasl_ssl")
    sasl = kafka.security in ("sasl_ssl", "sasl_plaintext")
    if kafka.security == "sasl_plaintext" and not kafka.sasl_without_tls:
        raise _SettingError(
            "kafka",
            "security",
            "sasl_plaintext proves who we are over a connection that anybody on the way can read and take "
            "over; use sasl_ssl, or set kafka.sasl_without_tls: true where the network is trusted",
        )
    for key in ("ca_file", "certificate_file", "key_file", "key_password"):
        if not tls and getattr(kafka, key):
            raise _SettingError("kafka", key, f"no use without TLS: kafka.security is {kafka.security}")
    for key in ("username", "password"):
        if not sasl and getattr(kafka, key):
            raise _SettingError("kafka", key, f"no use without SASL: kafka.security is {kafka.security}")
        if sasl and not getattr(kafka, key):
            told = "" if key == "username" else " or kafka.password_file"
            raise _SettingError("kafka", "security", f"{kafka.security} needs kafka.{key}{told}")
    if kafka.key_file and not kafka.certificate_file:
        raise _SettingError("kafka", "key_file", "a key without its certificate: set kafka.certificate_file")
    if tls:
        try:
            client_context(kafka.ca_file, kafka.certificate_file, kafka.key_file, kafka.key_password)
        except TlsFileError as error:
            key = error.setting
            told = f"{key}_file" if key == "key_password" and kafka.key_password_file else key
            raise _SettingError("kafka", told, str(error)) from None
