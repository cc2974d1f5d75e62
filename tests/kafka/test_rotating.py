"""docs/operate.md: a password is rotated on a broker, by the line that stands there, while a worker runs."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.workers import topics
from pipeline.workers.acls import create_acls
from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.kafka.broker import KAFKA_SH, SHORT_LIVED, Broker
from tests.kafka.processes import Worker
from tests.kafka.records import Written, produce
from tests.kafka.secure import ADMIN, Authority, SecureKafka, secure_kafka
from tests.monitoring.firings import seen, total
from tests.monitoring.installation import until_ready
from tests.monitoring.scraping import address_of
from tests.workers.events import encoded, request, soon_us

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = (REPOSITORY / "docs" / "operate.md").read_text(encoding="utf-8")
USER = "klaxon-measure"
NEW = "another-password"
TOOLS = {"kafka-configs.sh": "kafka.admin.ConfigCommand"}
"""Kafka's tools that are among the jars of a broker."""
ELSEWHERE = {"kafka-topics.sh", "kafka-reassign-partitions.sh"}
"""Those that are not: their options are not looked at here."""


def tool(command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run one of Kafka's tools, as a line of the page names it; blocks."""
    name, *arguments = shlex.split(command)
    jars = subprocess.run([KAFKA_SH, "jars"], capture_output=True, text=True, check=True).stdout.strip()
    java = ["java", *SHORT_LIVED.split(), "-cp", f"{jars}/*", TOOLS[name], *arguments, *more]
    return subprocess.run(java, capture_output=True, text=True, check=False)


def test_every_option_of_kafkas_tools_exists() -> None:
    lines = re.findall(r"`(kafka-[a-z-]+\.sh [^`]+)`", PAGE)
    assert {line.partition(" ")[0] for line in lines} == {*TOOLS, *ELSEWHERE}
    for line in lines:
        name = line.partition(" ")[0]
        if name in TOOLS:
            said = tool(f"{name} --help")
            known = set(re.findall(r"^(--[a-z-]+)", said.stdout + said.stderr, re.MULTILINE))
            assert len(known) > 10, said.stderr
            assert {word for word in shlex.split(line) if word.startswith("--")} <= known
            assert "--entity-named" not in known


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """A broker with our topics, our rights and one user."""
    with secure_kafka(tmp_path_factory.mktemp("rotating") / "broker", [USER]) as kafka:
        admin = kafka.as_user(ADMIN).config
        asyncio.run(topics.create(admin))
        asyncio.run(create_acls(Config(kafka=admin)))
        yield kafka


def with_password_file(broker: Broker, file: Path) -> Broker:
    """Told where the password stands instead of what it is."""
    kept = {name: value for name, value in broker.environment.items() if name != "KLAXON_KAFKA_PASSWORD"}
    return Broker(broker.config, {**kept, "KLAXON_KAFKA_PASSWORD_FILE": str(file)})


async def test_a_password_is_rotated_while_its_worker_runs(
    secured: SecureKafka, log_folder: Path, tmp_path: Path
) -> None:
    (line,) = re.findall(r"`(kafka-configs\.sh .*--entity-name )klaxon-gate( .*?\[password=)…(\]')`", PAGE)
    file = tmp_path / "password"
    file.write_text(secured.password(USER))
    by_file = with_password_file(secured.as_user(USER), file)
    async with Worker("measure", by_file, log_folder) as before:
        at = {"measure": await address_of(before)}
        await until_ready(at["measure"])
        file.write_text(NEW)
        begin, middle, end = line
        changing = (f"{begin}{USER}{middle}{NEW}{end}", "--bootstrap-server", secured.open.bootstrap)
        changed = await asyncio.to_thread(tool, *changing)
        assert changed.returncode == 0, changed.stderr
        # Its connections stand.
        await produce(secured.open, [Written(Topic.REQUESTS, encoded(request(soon_us())), partition=0)])
        await seen(at, lambda now: total(now, "measure", "klaxon_counted_total", outcome="requests") == 1)
        # Whoever connects anew with the old one is refused.
        async with Worker("measure", secured.as_user(USER), log_folder) as late:
            assert await late.until_ended() == 2
            assert f"refuses the log-in of '{USER}'" in late.log
        assert await before.stop() == 0, before.log
    async with Worker("measure", by_file, log_folder) as after:
        await until_ready(await address_of(after))
        assert await after.stop() == 0, after.log


def renew(authority: Authority, held: Path) -> str:
    """A new key and certificate of the same subject, for rights hang on it; in its place at once."""
    Path(authority.certificate(USER)).unlink()
    made = held.with_suffix(".next")
    made.write_text(Path(authority.certificate(USER)).read_text())
    return made.replace(held).read_text()


async def test_a_certificate_is_renewed_and_a_second_authority_is_believed(
    secured: SecureKafka, log_folder: Path, tmp_path: Path
) -> None:
    both, held = tmp_path / "authorities.pem", tmp_path / "measure.pem"
    authorities = (secured.authority, Authority(tmp_path / "other"))
    both.write_text("".join((each.folder / "ca.pem").read_text() for each in authorities))
    environment = {"KLAXON_KAFKA_CA_FILE": str(both), "KLAXON_KAFKA_CERTIFICATE_FILE": str(held)}
    holder = secured.as_holder(USER)
    before = renew(secured.authority, held)
    for _ in range(2):
        async with Worker("measure", holder, log_folder, environment=environment) as worker:
            await until_ready(await address_of(worker))
            assert before != (before := renew(secured.authority, held))
            assert await worker.stop() == 0, worker.log
