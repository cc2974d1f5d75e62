"""Apache Kafka as in production: SASL_SSL with SCRAM, and TLS with certificates, behind an authorizer.

Its plain listener stays, for tests to prepare and look: who comes in there may do everything, and nobody else
may, but who logs in as ADMIN.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.cli.demo.ports import free_port
from pipeline.config import KafkaConfig
from pipeline.secret import Secret
from tests.conftest import required_or_skip
from tests.kafka.broker import SHORT_LIVED, Broker, broker_of, kafka_sh, none_left

ADMIN = "klaxon-admin"
AUTHORIZER = "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer"
PROPERTIES = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
listener.name.ssl.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^CN=([^,]+)$/$1/,DEFAULT
sasl.enabled.mechanisms=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
super.users=User:ANONYMOUS;User:{admin}
{authorizer}
"""


class Authority:
    """Certificates, made by openssl in a folder: `ca.pem`, and `NAME.pem` with key and certificate in it."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            required_or_skip("openssl is not installed: certificates for the test are made by it")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._new("ca", "/CN=Klaxon's test authority")

    @property
    def file(self) -> str:
        """The authority's own certificate."""
        return str(self.folder / "ca.pem")

    def certificate(self, name: str, *, address: str = "127.0.0.1", password: str | None = None) -> str:
        """The file with the key (encrypted, with a password) and certificate of this name; made once."""
        made = self.folder / f"{name}.pem"
        if not made.exists():
            signed = ["-CA", self.file, "-CAkey", str(self.folder / "ca.key")]
            self._new(name, f"/CN={name}", *signed, "-addext", f"subjectAltName=IP:{address}")
            key = self.folder / f"{name}.key"
            if password is not None:
                plain, key = key, Path(f"{key}.p8")
                _openssl(
                    "pkcs8", "-topk8", "-in", str(plain), "-out", str(key), "-passout", f"pass:{password}"
                )
            made.write_text(key.read_text() + made.read_text())
        return str(made)

    def _new(self, name: str, subject: str, *more: str) -> None:
        made = (str(self.folder / f"{name}.key"), "-out", str(self.folder / f"{name}.pem"))
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
        _openssl("req", "-x509", *curve, "-nodes", "-days", "2", "-subj", subject, *more, "-keyout", *made)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]} failed:\n{done.stderr}")


@dataclass(frozen=True)
class SecureKafka:
    """One broker. `open` reaches its plain listener."""

    folder: Path
    open: Broker
    scram: str
    mtls: str
    authority: Authority

    def password(self, user: str) -> str:
        """Of a user with SCRAM."""
        return f"password-of-{user}"

    def as_user(self, user: str) -> Broker:
        """The broker for whoever logs in as this user."""
        return self._with(
            bootstrap=self.scram,
            security="sasl_ssl",
            ca_file=self.authority.file,
            username=user,
            password=Secret(self.password(user)),
        )

    def as_holder(self, name: str) -> Broker:
        """The broker for whoever holds the certificate of this name."""
        return self._with(
            bootstrap=self.mtls,
            security="ssl",
            ca_file=self.authority.file,
            certificate_file=self.authority.certificate(name),
        )

    def _with(self, **changed: object) -> Broker:
        return broker_of(msgspec.structs.replace(self.open.config, **changed))

    def without_authorizer(self) -> None:
        """Start the broker again, on the same data, without its authorizer; blocks."""
        kafka_sh("stop", self.folder)
        file = self.folder / "server.properties"
        file.write_text(file.read_text().replace(AUTHORIZER, ""))
        kafka_sh("start", self.folder, {"KAFKA_JVM": SHORT_LIVED})


@contextmanager
def secure_kafka(folder: Path, users: Iterable[str]) -> Iterator[SecureKafka]:
    """A broker with its data in `folder`, where these users and ADMIN log in. No Java: skips (CI: fails)."""
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            required_or_skip(f"{program} is not installed: Apache Kafka's jars need Java 17 and Maven 3.8")
    authority = Authority(folder.parent / f"{folder.name}-certificates")
    authority.certificate("broker")
    properties = authority.folder / "server.properties"
    properties.write_text(PROPERTIES.format(folder=authority.folder, admin=ADMIN, authorizer=AUTHORIZER))
    scram, mtls = (f"127.0.0.1:{free_port()}" for _ in range(2))
    variables = {
        "KAFKA_JVM": SHORT_LIVED,
        "KAFKA_LISTENERS": f"SASL_SSL://{scram},SSL://{mtls},",
        "KAFKA_PROPERTIES": str(properties),
        "KAFKA_SCRAM": " ".join(f"{user}=password-of-{user}" for user in (*users, ADMIN)),
    }
    with none_left(folder):
        bootstrap = kafka_sh("start", folder, variables)
        config = KafkaConfig(
            bootstrap=bootstrap,
            replication=1,
            partitions=2,
            session_timeout_ms=6_000,
            rebalance_timeout_ms=6_000,
            connect_timeout_s=20,
        )
        try:
            yield SecureKafka(folder, broker_of(config), scram, mtls, authority)
        finally:
            kafka_sh("stop", folder)
