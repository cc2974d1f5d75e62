"""infra/clickhouse/users.xml, tried on the engine that enforces it: every account does its work, and no more.

chDB is ClickHouse's own code, its access control included, but lets in nobody except `default`. So each is
tried as `default`: the file as it is, with one account's name and password replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import ProgrammingError

from pipeline.store.archive import TABLES, Archive
from pipeline.store.blocks import BlockLimits
from pipeline.store.client import ReadLimits, Store
from pipeline.store.errors import QueryError
from pipeline.store.migrate import migrate
from pipeline.store.queries import run_query
from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.store.records import START_US, LogRecord, packed, pair_batch, request_log

USERS = REPOSITORY / "infra" / "clickhouse" / "users.xml"
PASSWORDS = REPOSITORY / "infra" / "clickhouse" / "passwords.sh"
ACCOUNTS = ("klaxon_migrator", "klaxon_writer", "klaxon_analyst", "klaxon_grafana")
BASE = "<clickhouse><profiles><default/></profiles><users/><quotas><default/></quotas></clickhouse>"
ADMINISTRATOR = (
    "<default><password/><networks><ip>::/0</ip></networks><access_management>1</access_management></default>"
)

NO_RIGHT, READ_ONLY, OUT_OF_BOUNDS, OVER_QUOTA = 497, 164, 452, 201
NEVER = threading.Event()

REFUSED: dict[str, dict[int, tuple[str, ...]]] = {
    "klaxon_migrator": {
        NO_RIGHT: (
            "DROP TABLE decisions",
            "DROP DATABASE klaxon",
            "TRUNCATE TABLE decisions",
            "ALTER TABLE decisions DELETE WHERE 1",
            "ALTER TABLE decisions DROP PARTITION '2026-01-01'",
            "ALTER TABLE decisions DROP COLUMN rule",
            "INSERT INTO archive_progress VALUES ('t', 0, 1)",
            "CREATE TABLE default.t (n UInt8) ENGINE = ReplacingMergeTree ORDER BY n",
            "CREATE USER somebody",
        ),
    },
    "klaxon_writer": {
        NO_RIGHT: (
            "SELECT session FROM inference_log",
            "SELECT record FROM decisions",
            "SELECT count() FROM v_decisions",
            "ALTER TABLE decisions DELETE WHERE 1",
            "ALTER TABLE decisions UPDATE rule = '' WHERE 1",
            "ALTER TABLE decisions DROP PARTITION '2026-01-01'",
            "OPTIMIZE TABLE decisions FINAL",
            "DROP TABLE decisions",
            "TRUNCATE TABLE decisions",
            "INSERT INTO schema_migrations VALUES (9, 'f', 's', 0)",
            "CREATE TABLE t (n UInt8) ENGINE = ReplacingMergeTree ORDER BY n",
        ),
    },
    "klaxon_analyst": {
        NO_RIGHT: (
            "INSERT INTO archive_progress VALUES ('t', 0, 1)",
            "ALTER TABLE decisions DELETE WHERE 1",
            "CREATE TEMPORARY TABLE t (n UInt8)",
        ),
        READ_ONLY: (
            "SET max_execution_time = 0",
            "SELECT 1 SETTINGS max_memory_usage = 0",
            "SET readonly = 0",
        ),
    },
    "klaxon_grafana": {
        NO_RIGHT: (
            "INSERT INTO archive_progress VALUES ('t', 0, 1)",
            "CREATE TEMPORARY TABLE t (n UInt8)",
            "SELECT session FROM v_inference_log",
            "SELECT session FROM inference_log",
            "SELECT embedding FROM inference_log",
            "SELECT count() FROM inference_log WHERE consent_id = 'c'",
            "SELECT * FROM v_inference_log",
        ),
        READ_ONLY: ("SET readonly = 0",),
        OUT_OF_BOUNDS: (
            "SET max_execution_time = 0",
            "SET max_execution_time = 31",
            "SELECT 1 SETTINGS max_memory_usage = 0",
            "SELECT 1 SETTINGS max_result_rows = 0",
            "SELECT 1 SETTINGS result_overflow_mode = 'break'",
        ),
    },
}
OUTSIDE = (
    "url('http://127.0.0.1:1/', 'CSV', 'n UInt8')",
    "file('/etc/passwd', 'LineAsString', 'line String')",
    "remote('127.0.0.1:1', 'system', 'one')",
    "s3('http://127.0.0.1:1/bucket/key', 'CSV', 'n UInt8')",
)


class Server:
    """One folder of chDB, entered as one account after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.migrated = False

    @contextmanager
    def entered_as(self, account: str, text: str | None = None) -> Iterator[Store]:
        """The account's own rights, profile and quota; `text`: another file than the published one."""
        root = ET.fromstring(text if text is not None else USERS.read_text())
        for user in root.iterfind(f"users/{account}"):
            user.tag = "default"
            for password in user.findall("password_sha256_hex"):
                user.remove(password)
                ET.SubElement(user, "password")
        place = self._folder / account
        (place / "users.d").mkdir(parents=True, exist_ok=True)
        (place / "users.xml").write_text(BASE)
        (place / "users.d" / "klaxon.xml").write_text(ET.tostring(root, encoding="unicode"))
        config = place / "config.xml"
        config.write_text(f"<clickhouse><users_config>{place}/users.xml</users_config></clickhouse>")
        client = clickhouse_connect.get_client(
            dsn=f"chdb://{self._folder}/archive", chdb_options={"config-file": str(config)}
        )
        store = Store(client, "chdb", "klaxon", None, None)
        try:
            if self.migrated:
                store.command("USE klaxon")
            yield store
        finally:
            client.close()


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for account in ACCOUNTS:
            patch.setenv(f"KLAXON_CLICKHOUSE_{account.removeprefix('klaxon_').upper()}_SHA256", "0" * 64)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: None) -> Server:
    """Migrated by the migrator, with some rows of the writer's."""
    server = Server(tmp_path_factory.mktemp("clickhouse"))
    with server.entered_as("klaxon_migrator") as store:
        # What `klaxon migrate` does: create_database, then the files.
        store.command("CREATE DATABASE IF NOT EXISTS `klaxon`")
        store.command("USE klaxon")
        assert migrate(store, now_us=1).applied
        assert not migrate(store, now_us=2).applied
    server.migrated = True
    with server.entered_as("klaxon_writer") as store:
        archive = Archive(store, BlockLimits(rows=40, size_bytes=1 << 20, age_us=1_000), "boot")
        assert _stored(archive, Topic.REQUESTS, request_log(1, 30)) > 40
        pairs = LogRecord(0, START_US, packed(pair_batch()), None, rows=1)
        assert _stored(archive, Topic.PAIRS, [pairs]) > 0
    return server


def _stored(archive: Archive, topic: Topic, log: list[LogRecord]) -> int:
    """Store a log as the worker does, and ask all that it asks."""
    part, rows = archive.open_partition(topic, 0), 0
    for record in log:
        part.add(record, record.offset)
    while block := part.take(1 << 40, force=True):
        assert archive.store_block(block, NEVER)
        assert archive._missing(block) is None
        part.stored(block)
        rows += block.rows
    assert archive.checkpoint(topic, 0).completing is None
    assert archive.surplus(topic) == 0
    return rows


@pytest.mark.parametrize("account", ACCOUNTS)
def test_what_an_account_may_not_do_is_refused(server: Server, account: str) -> None:
    outside = tuple(f"SELECT * FROM {function}" for function in OUTSIDE)
    with server.entered_as(account) as store:
        for code, statements in {**REFUSED[account], -NO_RIGHT: outside}.items():
            for sql in statements:
                with pytest.raises(QueryError) as refused:
                    store.rows(sql)
                assert refused.value.code == abs(code), f"{sql}: {refused.value}"


def test_the_writer_may_write_every_table_and_see_where_it_stands(server: Server) -> None:
    with server.entered_as("klaxon_writer") as store:
        archive = Archive(store, BlockLimits(rows=40, size_bytes=1 << 20, age_us=1_000), "boot")
        for topic, table in TABLES.items():
            store.command(f"INSERT INTO {table} (topic, part, off) VALUES ('{topic.value}', 9, 7)")
            assert archive.checkpoint(topic, 9).next_offset > 0
            assert archive.surplus(topic) == 0
        store.command("INSERT INTO archive_progress VALUES ('t', 9, 7)")


def test_a_later_migration_may_add_a_column_and_renew_a_view(server: Server) -> None:
    with server.entered_as("klaxon_migrator") as store:
        store.command("ALTER TABLE node_telemetry ADD COLUMN IF NOT EXISTS later Nullable(String)")
        store.command("CREATE OR REPLACE VIEW v_node_telemetry AS SELECT * FROM node_telemetry FINAL")


def test_known_bad_a_right_too_many_is_seen(server: Server) -> None:
    text = USERS.read_text()
    more = text.replace("GRANT SELECT ON klaxon.schema_migrations", "GRANT SELECT, INSERT ON klaxon.*")
    assert more != text
    with server.entered_as("klaxon_writer", more) as store:
        store.rows("SELECT session FROM inference_log")


def test_an_analyst_asks_what_the_archive_page_asks(server: Server) -> None:
    page = (REPOSITORY / "docs" / "archive.md").read_text()
    questions = re.findall(r"^```sql\n(.+?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(questions) > 5
    with server.entered_as("klaxon_analyst") as store:
        for question in questions:
            run_query(store, question)
        assert run_query(store, "SELECT count() FROM v_inference_log").rows[0][0] > 40
        run_query(store, "SELECT * FROM schema_migrations FINAL ORDER BY number")  # klaxon doctor


def test_klaxon_sql_asks_for_the_limits_of_the_analysts_account_and_no_others(server: Server) -> None:
    """With readonly = 1 the driver sends no setting that has its value already, and refuses any other."""
    wanted = {"readonly": 1, **ReadLimits().settings}
    with server.entered_as("klaxon_analyst") as store:
        driver = store._client
        assert driver._validate_settings(wanted) == {}
        with pytest.raises(ProgrammingError, match="max_execution_time is readonly"):
            driver._validate_settings({**wanted, "max_execution_time": 61})


def test_grafana_draws_dashboards(server: Server) -> None:
    with server.entered_as("klaxon_grafana") as store:
        store.rows("SET max_execution_time = 20")  # the plugin, with every query
        views = [name for (name,) in store.rows("SELECT name FROM system.tables WHERE database = 'klaxon'")]
        assert {f"v_{table}" for table in TABLES.values()} < set(views)  # its query builder
        (row,) = store.rows("SELECT count(), max(latency_ms), uniq(node) FROM v_inference_log WHERE shadow")
        assert row[0] > 40
        for table in set(TABLES.values()) - {"inference_log"}:
            store.rows(f"SELECT * FROM v_{table} LIMIT 1")


def test_quotas_end_a_flood_of_queries(server: Server) -> None:
    text = USERS.read_text()
    few = text.replace("<queries>2000</queries>", "<queries>5</queries>")
    assert few != text
    with server.entered_as("klaxon_analyst", few) as store:
        for _ in range(2):  # entering took some
            store.rows("SELECT count() FROM v_decisions")
        with pytest.raises(QueryError) as refused:
            [store.rows("SELECT count() FROM v_decisions") for _ in range(10)]
    assert refused.value.code == OVER_QUOTA


def test_the_file_as_it_is_makes_four_accounts_with_hashed_passwords(server: Server) -> None:
    text = USERS.read_text().replace("<users>", f"<users>{ADMINISTRATOR}")
    with server.entered_as("default", text) as store:
        found = store.rows("SELECT name, toString(auth_type) FROM system.users WHERE name != 'default'")
    assert dict(found) == dict.fromkeys(ACCOUNTS, "['sha256_password']")


def test_only_sha256_from_the_environment_and_no_account_without_profile_and_quota() -> None:
    root = ET.parse(USERS).getroot()
    assert tuple(user.tag for user in root.iterfind("users/*")) == ACCOUNTS
    profiles, quotas = ({each.tag for each in root.iterfind(f"{kind}/*")} for kind in ("profiles", "quotas"))
    for user in root.iterfind("users/*"):
        password = user.find("password_sha256_hex")
        assert password is not None
        assert password.text is None
        name = user.tag.removeprefix("klaxon_").upper()
        assert password.attrib == {"from_env": f"KLAXON_CLICKHOUSE_{name}_SHA256"}
        assert user.findtext("profile") in profiles
        assert user.findtext("quota") in quotas


def test_passwords_are_new_each_time_and_the_hashes_are_theirs() -> None:
    made = [_environment_file() for _ in range(2)]
    for account in ("MIGRATOR", "WRITER", "ANALYST", "GRAFANA"):
        passwords = [lines[f"KLAXON_CLICKHOUSE_{account}_PASSWORD"] for lines in made]
        assert len(set(passwords)) == 2
        for password, lines in zip(passwords, made, strict=True):
            assert len(password) == 32
            hashed = hashlib.sha256(password.encode()).hexdigest()
            assert lines[f"KLAXON_CLICKHOUSE_{account}_SHA256"] == hashed


def _environment_file() -> dict[str, str]:
    ran = subprocess.run([PASSWORDS], capture_output=True, text=True, check=True, env=dict(os.environ))
    return dict(line.split("=", 1) for line in ran.stdout.splitlines())
