"""Reading: the client's errors, the read-only handle, the query endpoint, `klaxon migrate`, `klaxon sql`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from pipeline.store.client import ReadLimits, Store, connect, connect_read_only
from pipeline.store.embedded import embedded_folder
from pipeline.store.errors import QueryError, RowError, StoreError, StoreUnavailableError
from pipeline.store.queries import QueryEndpoint, listen_address, query_endpoint, run_query
from pipeline.store.read_only import INSIDE, bare, readable
from tests.store.conftest import folder_of

pytestmark = pytest.mark.slow


def klaxon(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KLAXON_")}
    return subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", *arguments],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def endpoint(engine: str, store: Store) -> Iterator[str]:
    served = QueryEndpoint(connect_read_only(engine, store.database), "127.0.0.1:0")
    yield served.address
    served.close()


@pytest.mark.parametrize(
    ("dsn", "folder"),
    [
        ("chdb:///a/b", "/a/b"),
        ("chdb:////a/b", "/a/b"),
        ("http://ch:8123", None),
        ("https://user:secret@ch:8443/x", None),
    ],
)
def test_addresses(dsn: str, folder: str | None) -> None:
    assert embedded_folder(dsn) == (None if folder is None else Path(folder))


NO_HOSTS = ["http://[::1", "http://h:99999999", "http://h:port"]


@pytest.mark.parametrize(
    "dsn", ["", "foo", "chdb:", "chdb://host/a", "clickhouse://x", "http://", "/a/b", *NO_HOSTS]
)
def test_wrong_addresses_are_refused_with_what_is_expected(dsn: str) -> None:
    with pytest.raises(StoreError, match="expected http://host:8123"):
        embedded_folder(dsn)


def test_a_password_is_never_shown() -> None:
    with pytest.raises(StoreError) as raised:
        embedded_folder("clickhouse://user:secret@host")
    assert "secret" not in str(raised.value)


def test_a_missing_database_names_the_remedy(engine: str) -> None:
    with pytest.raises(QueryError, match=r"no database 'nowhere'; create it with `klaxon migrate`"):
        connect(engine, "nowhere")


def test_values_that_do_not_fit_are_a_row_error(store: Store) -> None:
    with pytest.raises(RowError, match="archive_progress"):
        store.insert("archive_progress", {"topic": ["t"], "part": [-1], "upto": [1]}, "a")
    with pytest.raises(RowError, match="archive_progress"):
        store.insert("archive_progress", {"topic": ["\ud800"], "part": [1], "upto": [1]}, "b")
    assert store.rows("SELECT count() FROM archive_progress") == [(0,)]


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO archive_progress SELECT 't', 1, 1",
        "DROP TABLE archive_progress",
        "CREATE TABLE x (n UInt8) ENGINE = Memory",
        "SELECT * FROM file('/etc/passwd', 'LineAsString')",
        "SELECT * FROM url('http://127.0.0.1:1/', 'LineAsString')",
        "SELECT 1 SETTINGS readonly = 0",
        "SELECT 1 SETTINGS max_memory_usage = 0",
        "SET readonly = 0",
    ],
)
def test_the_read_only_handle_only_reads(engine: str, store: Store, statement: str) -> None:
    reader = connect_read_only(engine, store.database)
    with pytest.raises(QueryError):
        run_query(reader, statement)
    with pytest.raises(QueryError):
        reader.command(statement)
    assert run_query(reader, "SELECT 1").rows == ((1,),)
    reader.close()
    store.insert("archive_progress", {"topic": ["t"], "part": [1], "upto": [1]}, "a")


def test_no_query_writes_a_file(engine: str, store: Store, endpoint: str, tmp_path: Path) -> None:
    """chDB obeys INTO OUTFILE whatever the handle may do."""
    target = tmp_path / "stolen"
    read_only = connect_read_only(engine, store.database)
    try:
        for words in ("INTO OUTFILE", "into/**/outfile"):
            statement = f"SELECT 1 {words} '{target}'"
            with pytest.raises(QueryError, match="writes a file"):
                run_query(read_only, statement)
            with pytest.raises(QueryError, match="writes a file"):
                query_endpoint(endpoint, statement)
            host, port = listen_address(endpoint)
            connection = HTTPConnection(host, port, timeout=30)
            connection.request("POST", "/", statement.encode(), {"Accept": "text/tab-separated-values"})
            assert connection.getresponse().status == 400
            connection.close()
    finally:
        read_only.close()
    assert not target.exists()


NO_READS = {
    "SELECT 1 INTO OUTFILE '{target}'": "writes a file",
    "SELECT 1 INTO OUTFILE '{target}' TRUNCATE": "writes a file",
    "SELECT 1 INTO OUTFILE '{target}' APPEND AND STDOUT FORMAT CSV;": "writes a file",
    "select 1 -- x\ninto/* y */\toutfile # z\n'{target}' format CSV": "writes a file",
    "WITH 1 AS a SELECT a UNION ALL SELECT 2 INTO OUTFILE '{target}'": "writes a file",
    "DESCRIBE archive_progress INTO OUTFILE '{target}'": "writes a file",
    "SHOW TABLES INTO OUTFILE '{target}'": "writes a file",
    "EXPLAIN SYNTAX SELECT 1 INTO OUTFILE '{target}'": "writes a file",
    "EXPLAIN AST SELECT 1 INTO OUTFILE '{target}'": "one SELECT is expected",
    "INSERT INTO FUNCTION file('{target}', 'CSV', 'a Int8') SELECT 1": "not INSERT",
    "WITH 1 AS a INSERT INTO FUNCTION file('{target}', 'CSV', 'a Int8') SELECT a": "not INSERT",
    "EXPLAIN INSERT INTO archive_progress SELECT 't', 1, 1": "not EXPLAIN INSERT",
    "EXPLAIN CREATE TABLE x (a Int8) ENGINE = Memory": "not EXPLAIN CREATE",
    "BACKUP DATABASE default TO File('{target}')": "not BACKUP",
    "/* SELECT */ SYSTEM FLUSH LOGS": "not SYSTEM",
    "KILL QUERY WHERE 1": "not KILL",
    "SET readonly = 0": "one SELECT is expected .*, not SET$",
    "USE system": "not USE",
    "DESCRIBE TABLE sqlite('{target}', 't')": "sqlite",
    "SELECT * FROM sqlite('{target}', 't')": "sqlite",
    "SELECT * FROM `SQLite` /* x */ ('{target}', 't')": "sqlite",
    "SHOW TABLES WHERE name IN (SELECT * FROM sqlite('{target}', 't'))": "sqlite",
    "DESCRIBE TABLE url('http://127.0.0.1:1/x')": "url",
    "DESCRIBE (SELECT * FROM s3('http://127.0.0.1:1/bucket/x.csv'))": "s3",
    "SELECT * FROM remote('127.0.0.1:1', system.one)": "remote",
    "SELECT * FROM Python(x)": "python",
    "SELECT file('/etc/passwd')": "file",
    "SELECT arrayMap(file, ['/etc/passwd'])": "file",
    "SELECT * APPLY(x -> `file`(x)) FROM (SELECT '/etc/passwd' AS a)": "file",
    "SHOW TABLES WHERE file('/etc/passwd') != ''": "file",
    "": "one SELECT is expected .*; the query is empty$",
    " ;\n; ": "the query is empty",
    "-- only a comment": "the query is empty",
    "/* ; */ ; # x": "the query is empty",
    "SELECT 1; SELECT 2": "one SELECT is expected .*, not several statements$",
    "SELECT 1; SET readonly = 0; SELECT 2": "several statements",
    "SELECT 1 PARALLEL WITH DROP TABLE archive_progress": "several statements",
    "SELECT 1 FORMAT CSV": "^leave FORMAT out; .*--json",
    "SELECT 1 FORMAT CSV SETTINGS max_threads = 1; -- x": "leave FORMAT out",
    "SHOW TABLES FORMAT CSV": "leave FORMAT out",
    "SELECT 1 /* open": "comment is not closed",
    "SELECT '\ud800'": "not UTF-8",
    r"SELECT '\xff'": "not UTF-8",
}


@pytest.mark.parametrize(("statement", "reason"), NO_READS.items())
def test_what_does_not_read_the_archive_is_refused_in_one_line(
    engine: str, store: Store, endpoint: str, tmp_path: Path, statement: str, reason: str
) -> None:
    target = tmp_path / "stolen"
    statement = statement.replace("{target}", str(target))
    read_only = connect_read_only(engine, store.database)
    try:
        with pytest.raises(QueryError, match=reason) as raised:
            run_query(read_only, statement)
        with pytest.raises(QueryError, match=reason):
            query_endpoint(endpoint, statement)
    finally:
        read_only.close()
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    assert not any(ours in message for ours in ("JSONCompact", "formatQuery", "'x'"))
    assert not target.exists()


READS = {
    "SELECT 'INTO OUTFILE ''x''; INSERT INTO t FORMAT CSV -- file(1)'": "INTO OUTFILE 'x'; INSERT INTO t "
    "FORMAT CSV -- file(1)",
    "SELECT $$a' INTO OUTFILE 'b$$": "a' INTO OUTFILE 'b",
    r"SELECT 'it\'s; ü' AS `INTO OUTFILE ``x``; FORMAT`; -- done": "it's; ü",
    "SELECT 1 AS format, 'url(''x'')' AS url ORDER BY format": 1,
    "SELECT format('{}-{}', 'a', 'b')": "a-b",
    "(SELECT 1) UNION ALL (SELECT 1)": 1,
    "/* a; b */ WITH 3 AS outfile SELECT outfile # INTO OUTFILE 'x'": 3,
    "FROM numbers(5) SELECT max(number);;": 4,
    "SELECT count() FROM (SELECT * FROM view(SELECT 1) WHERE 1 IN (SELECT * FROM values('a Int8', 1)))": 1,
    "EXISTS TABLE archive_progress": 1,
    "DESC archive_progress": "topic",
    "SHOW TABLES LIKE 'archive_progress' -- x": "archive_progress",
    "EXPLAIN QUERY TREE run_passes = 0 SELECT 1": "QUERY id: 0",
}


@pytest.mark.parametrize(("statement", "first"), READS.items())
def test_what_reads_works_whatever_it_quotes(
    engine: str, store: Store, endpoint: str, statement: str, first: object
) -> None:
    read_only = connect_read_only(engine, store.database)
    try:
        result = run_query(read_only, statement)
        assert result.rows[0][0] == first
        assert query_endpoint(endpoint, statement) == result
    finally:
        read_only.close()


def test_every_table_function_but_the_known_is_refused(engine: str, store: Store) -> None:
    """A newer ClickHouse has more of them; one that also is an ordinary function needs a look."""
    read_only = connect_read_only(engine, store.database)
    try:
        both = read_only.rows(
            "SELECT name FROM system.table_functions "
            "WHERE lower(name) IN (SELECT lower(name) FROM system.functions) ORDER BY name"
        )
        # `format` parses a text and is refused by the handle; `fuzzQuery` gives texts.
        assert both == [("file",), ("format",), ("fuzzQuery",)]
        for (name,) in read_only.rows("SELECT name FROM system.table_functions"):
            if name.lower() not in INSIDE and (name,) not in both:
                with pytest.raises(QueryError, match=r"reaches outside|Syntax error"):
                    readable(read_only, f"DESCRIBE TABLE `{name.upper()}`('x')")
    finally:
        read_only.close()


@pytest.mark.slow
@pytest.mark.parametrize("through_owner", [True, False])
def test_sql_command_refuses_in_one_line_with_2(
    engine: str, store: Store, endpoint: str, tmp_path: Path, through_owner: bool
) -> None:
    if through_owner:
        dsn, listen = engine, {"KLAXON_ARCHIVE_QUERY_LISTEN": endpoint}
    else:
        dsn, listen = f"chdb://{tmp_path / 'archive'}", {}
        assert klaxon("migrate", KLAXON_CLICKHOUSE_DSN=dsn).returncode == 0
    target = tmp_path / "stolen"
    database = {"KLAXON_CLICKHOUSE_DATABASE": store.database} if through_owner else {}
    for statement in (
        f"SELECT 1 INTO OUTFILE '{target}' TRUNCATE",
        "SELECT 1; SELECT 2",
        "",
        "SELECT 1 FORMAT CSV",
    ):
        done = klaxon("sql", statement, KLAXON_CLICKHOUSE_DSN=dsn, **database, **listen)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert not target.exists()


def test_limits_hold(engine: str, store: Store) -> None:
    reader = connect_read_only(engine, store.database, limits=ReadLimits(rows=10))
    with pytest.raises(QueryError, match="Limit for result exceeded"):
        run_query(reader, "SELECT number FROM numbers(11)")
    assert run_query(reader, "SELECT 1").rows == ((1,),)
    reader.close()
    # On a machine that stands still nothing else may be asked with so little time.
    hurried = connect_read_only(engine, store.database, limits=ReadLimits(time_s=1))
    with pytest.raises(QueryError, match="Timeout exceeded"):
        run_query(hurried, "SELECT sleepEachRow(1) FROM numbers(3)")
    hurried.close()


@pytest.mark.parametrize("form", ["JSONCompact", "TSVWithNames"])
def test_a_failed_query_leaves_nothing_in_the_next_answer(engine: str, store: Store, form: str) -> None:
    reader = connect_read_only(engine, store.database, limits=ReadLimits(rows=10))
    try:
        with pytest.raises(QueryError, match="Limit for result exceeded"):
            reader.text("SELECT number FROM numbers(11)", form)
        assert reader.text("SELECT 'mine'", "TSVRaw") == b"mine\n"
    finally:
        reader.close()


def test_results_are_plain_json_values(engine: str, store: Store) -> None:
    reader = connect_read_only(engine, store.database)
    sql = (
        "SELECT 18446744073709551615 AS u, nan AS n, toDateTime64(1.5, 6, 'UTC') AS t, [1, 2] AS a, NULL AS x"
    )
    result = run_query(reader, sql)
    assert result.names == ("u", "n", "t", "a", "x")
    assert result.rows == ((2**64 - 1, None, "1970-01-01 00:00:01.500000", [1, 2], None),)
    reader.close()


def test_the_endpoint_answers_rows_and_clear_errors(endpoint: str) -> None:
    result = query_endpoint(endpoint, "SELECT 1 AS one, 'ü' AS text;")
    assert (result.names, result.types, result.rows) == (("one", "text"), ("UInt8", "String"), ((1, "ü"),))
    with pytest.raises(QueryError, match=r"^Code: 62\. DB::Exception: Syntax error") as raised:
        query_endpoint(endpoint, "SELEC 1")
    assert raised.value.code == 62
    with pytest.raises(QueryError, match=r"one SELECT is expected .*, not INSERT$"):
        query_endpoint(endpoint, "INSERT INTO archive_progress SELECT 't', 1, 1")


def test_the_endpoint_gives_tsv_where_asked(endpoint: str) -> None:
    host, port = listen_address(endpoint)
    connection = HTTPConnection(host, port, timeout=30)
    connection.request("POST", "/", b"SELECT 1 AS a, 2 AS b", {"Accept": "text/tab-separated-values"})
    answer = connection.getresponse()
    assert answer.read() == b"a\tb\n1\t2\n"
    connection.close()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example:80"}, b"SELECT 1", 403),
        ({"Content-Length": str(2 << 20)}, b"", 413),
        ({"Content-Length": "-1"}, b"", 413),
    ],
)
def test_the_endpoint_refuses_foreign_names_and_huge_queries(
    endpoint: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    host, port = listen_address(endpoint)
    connection = HTTPConnection(host, port, timeout=30)
    connection.putrequest("POST", "/", skip_host="Host" in headers)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == status
    connection.close()


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:80", "192.168.1.1:80", "host:80", "127.0.0.1", "127.0.0.1:99999", ""]
)
def test_the_endpoint_is_never_opened_to_a_network(listen: str) -> None:
    with pytest.raises(StoreError, match=r"archive\.query_listen"):
        listen_address(listen)


def test_a_taken_port_and_an_absent_endpoint(engine: str, store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreError, match="choose a free port"):
            QueryEndpoint(store, address)
    with pytest.raises(StoreUnavailableError, match="query endpoint"):
        query_endpoint(address, "SELECT 1")


def test_statements_lose_their_end_only() -> None:
    assert bare(" SELECT ';' ;\n; ") == "SELECT ';'"


def test_sql_command_goes_through_the_owner_of_the_folder(engine: str, store: Store, endpoint: str) -> None:
    variables = {"KLAXON_CLICKHOUSE_DSN": engine, "KLAXON_CLICKHOUSE_DATABASE": store.database}
    locked = klaxon("sql", "SELECT 1", **variables)
    assert locked.returncode == 3
    assert "archive.query_listen" in locked.stderr
    through = klaxon("sql", "--json", "SELECT 2 AS n", **variables, KLAXON_ARCHIVE_QUERY_LISTEN=endpoint)
    assert (through.returncode, through.stderr) == (0, "")
    assert json.loads(through.stdout) == {
        "columns": [{"name": "n", "type": "UInt8"}],
        "rows": [[2]],
        "row_count": 1,
    }
    wrong = klaxon("sql", "SELEC 1", **variables, KLAXON_ARCHIVE_QUERY_LISTEN=endpoint)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("klaxon: Code: 62. DB::Exception: Syntax error")
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.slow
def test_migrate_and_sql_commands_on_a_free_folder(tmp_path: Path) -> None:
    variables = {"KLAXON_CLICKHOUSE_DSN": f"chdb://{tmp_path / 'archive'}"}
    absent = klaxon("sql", "SELECT 1", **variables)
    assert (absent.returncode, "klaxon migrate" in absent.stderr) == (2, True)
    first = klaxon("migrate", "--json", **variables)
    assert first.returncode == 0, first.stderr
    assert "0001_inference_log.sql" in json.loads(first.stdout)["applied"]
    assert json.loads(klaxon("migrate", "--json", **variables).stdout)["applied"] == []
    table = klaxon("sql", "SELECT 'x[red]y' AS text, 5 AS n", **variables)
    assert table.returncode == 0
    assert "x[red]y" in table.stdout
    wide = klaxon("sql", "SELECT * FROM schema_migrations ORDER BY number LIMIT 1", **variables)
    assert "0001_inference_log.sql" in wide.stdout
    other = {**variables, "KLAXON_CLICKHOUSE_DATABASE": "other"}
    missing = klaxon("sql", "SELECT 1", **other)
    assert (missing.returncode, "klaxon migrate" in missing.stderr) == (2, True)


def test_commands_without_a_server_end_with_3() -> None:
    variables = {"KLAXON_CLICKHOUSE_DSN": "http://user:secret@127.0.0.1:1"}
    for arguments in (("sql", "SELECT 1"), ("migrate",)):
        done = klaxon(*arguments, **variables)
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1
        assert "secret" not in done.stderr


def test_edited_migration_ends_with_2(tmp_path: Path) -> None:
    dsn = f"chdb://{tmp_path / 'archive'}"
    assert folder_of(dsn) == tmp_path / "archive"
    script = f"""
import pipeline.store.migrate as m
from pathlib import Path
import shutil, sys
folder = Path({str(tmp_path / "m")!r})
if not folder.exists():
    shutil.copytree(m.FOLDER, folder)
else:
    (folder / "0002_logit_summaries.sql").write_text("SELECT 1;")
m.migrate.__kwdefaults__["folder"] = folder
from pipeline.cli.main import main
sys.argv = ["klaxon", "migrate"]
main()
"""
    environ = {**os.environ, "KLAXON_CLICKHOUSE_DSN": dsn}
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 2], runs[1].stderr
    assert "0002_logit_summaries.sql was edited after it had been applied" in runs[1].stderr
    assert "Traceback" not in runs[1].stderr
