"""The table of rights: what it says, that it fits the code, and what differs from it on a broker."""

from __future__ import annotations

import re

import msgspec
import pytest
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from pipeline.config import ConfigError, KafkaConfig, PrincipalsConfig, load_config
from pipeline.workers import archive, gate, gate_log, measure, pair
from pipeline.workers.acl_table import (
    FILE,
    ROLES,
    AclTableError,
    Kind,
    Operation,
    Resource,
    granted,
    read_table,
    table,
)
from pipeline.workers.acls import Acl, differences, wanted
from pipeline.workers.rights import denial, denied
from schemas.topics import SOURCES, Topic
from tests.conftest import REPOSITORY

GATES_OWN = {Topic.CONTROL, Topic.DECISIONS, Topic.ROLLOUTS, Topic.STATE}
ALL_OF_IT = wanted(PrincipalsConfig(), table())


def topics_that(role: str, operation: Operation) -> set[Topic]:
    return {topic for topic in Topic if operation in granted(table(), role, Kind.TOPIC, topic.value)}


def test_infra_names_the_table_that_the_command_reads() -> None:
    assert (REPOSITORY / "infra" / "kafka" / "acls").resolve() == FILE


def test_the_table_fits_what_the_workers_read_and_write() -> None:
    inputs = set(measure.READS) | set(pair.READS)
    for role, module in (("measure", measure), ("pair", pair)):
        assert topics_that(role, Operation.READ) == set(module.READS)
        assert topics_that(role, Operation.WRITE) == {*module.WRITES, *module.READS}  # ticks
    assert inputs == set(SOURCES)
    assert topics_that("gate", Operation.READ) == {*gate.READS, *gate_log.MEMORY}
    assert topics_that("gate", Operation.WRITE) == set(gate.WRITES)
    assert topics_that("gate", Operation.DESCRIBE) >= set(SOURCES)
    assert topics_that("archive", Operation.READ) == set(archive.READS)
    assert topics_that("archive", Operation.WRITE) == {Topic.DEAD_LETTER}


def test_only_the_gate_writes_what_is_the_gates_and_replay_writes_nothing() -> None:
    for role in ROLES:
        assert topics_that(role, Operation.WRITE) & GATES_OWN == (GATES_OWN if role == "gate" else set())
    assert topics_that("replay", Operation.WRITE) == set()
    assert {role for role in ROLES if Topic.COMMANDS in topics_that(role, Operation.WRITE)} == {
        "operator",
        "console",
    }
    harmless = {Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS}
    assert {grant.operation for grant in table()} <= harmless
    assert {grant.role for grant in table()} == set(ROLES)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("gate read topic", "a topic has one name"),
        ("gate read", "a row is: role, operation, kind, name"),
        ("gates read topic klaxon.state", "no role 'gates'; known: measure, pair"),
        ("gate reads topic klaxon.state", "no operation 'reads'; known: all, read"),
        ("gate read topics klaxon.state", "nothing is a 'topics'; known: topic, group"),
        ("gate read topic klaxon.stat", "no topic 'klaxon.stat'; known: klaxon.requests"),
        ("gate read topic klaxon.state klaxon.control", "a topic has one name"),
        ("gate describe cluster kafka", "a cluster has no name"),
        ("gate read topic klaxon.state\ngate read topic klaxon.state # again", "acls.txt:2: stands twice"),
    ],
)
def test_a_mistake_in_the_table_names_its_line(row: str, told: str) -> None:
    with pytest.raises(AclTableError, match=r"^acls.txt:[12]: ") as caught:
        read_table(row)
    assert told in str(caught.value)


def test_principals_are_configured_by_role() -> None:
    principals = load_config(None, {"KLAXON_PRINCIPALS_NODE_AGENT": "User:CN=agent,O=us"}).principals
    assert principals.node_agent == "User:CN=agent,O=us"
    assert "User:CN=agent,O=us" in {acl.principal for acl in wanted(principals, table())}
    with pytest.raises(ConfigError, match="KLAXON_PRINCIPALS_GATE"):
        load_config(None, {"KLAXON_PRINCIPALS_GATE": "klaxon-gate"})


CLUSTER = Resource(Kind.CLUSTER, "kafka-cluster")


def topic(name: str, *, prefixed: bool = False) -> Resource:
    return Resource(Kind.TOPIC, name, prefixed)


@pytest.mark.parametrize(
    ("acl", "told"),
    [
        (Acl("User:x", Operation.WRITE, topic("klaxon.control")), True),
        (Acl("User:klaxon-pair", Operation.WRITE, topic("klaxon.control")), True),
        (Acl("User:x", Operation.ALL, topic("*")), True),
        (Acl("User:x", Operation.WRITE, topic("kla", prefixed=True)), True),
        (Acl("User:x", Operation.DELETE, topic("klaxon.control", prefixed=True)), True),
        (Acl("User:x", Operation.WRITE, Resource(Kind.TRANSACTIONAL_ID, "klaxon-gate-1")), True),
        (Acl("User:klaxon-gate", Operation.READ, topic("klaxon.control"), denies=True), True),
        (Acl("User:x", Operation.READ, Resource(Kind.GROUP, "klaxon-pair")), True),
        (Acl("User:x", Operation.READ, topic("klaxon.control")), False),
        (Acl("User:x", Operation.WRITE, topic("klaxon.controls")), False),
        (Acl("User:x", Operation.WRITE, topic("other")), False),
        (Acl("User:x", Operation.DESCRIBE, CLUSTER), False),
        (Acl("User:x", Operation.DESCRIBE_CONFIGS, CLUSTER), False),
        (Acl("User:x", Operation.IDEMPOTENT_WRITE, CLUSTER), False),
        (Acl("User:klaxon-operator", Operation.DESCRIBE, CLUSTER, denies=True), True),
    ],
)
def test_rights_over_and_above_are_told_if_they_change_what_is_ours(acl: Acl, told: bool) -> None:
    problems = list(map(str, differences(ALL_OF_IT, ALL_OF_IT | {acl})))
    assert problems == ([f"not in the table: {acl}; take it away with Kafka's kafka-acls.sh --remove"] * told)


@pytest.mark.parametrize(
    "operation",
    [
        Operation.ALL, Operation.ALTER, Operation.ALTER_CONFIGS, Operation.CLUSTER_ACTION, Operation.CREATE,
        Operation.DELETE,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["kafka-cluster", "*"])
def test_who_may_change_the_cluster_is_told(operation: Operation, name: str) -> None:
    """ALTER alone lets its holder grant himself all the rest."""
    acl = Acl("User:klaxon-gate", operation, Resource(Kind.CLUSTER, name))
    (problem,) = differences(ALL_OF_IT, ALL_OF_IT | {acl})
    assert not problem.missing
    assert str(problem) == (
        f"not in the table: User:klaxon-gate may {operation} cluster; unless that is a broker, whoever may "
        "change the cluster can give itself every right: take it away with Kafka's kafka-acls.sh --remove"
    )


def test_what_is_missing_is_told_in_a_line_per_principal() -> None:
    assert differences(ALL_OF_IT, ALL_OF_IT) == []
    gone = {acl for acl in ALL_OF_IT if acl.principal in ("User:klaxon-router", "User:klaxon-node-agent")}
    assert [str(one) for one in differences(ALL_OF_IT, ALL_OF_IT - gone) if one.missing] == [
        "User:klaxon-node-agent may not write topic klaxon.telemetry; run `klaxon topics create --acls`",
        "User:klaxon-router may not read topic klaxon.control, write topic klaxon.applied; "
        "run `klaxon topics create --acls`",
    ]


def test_a_denial_names_principal_operation_thing_and_remedy() -> None:
    kafka = msgspec.structs.replace(KafkaConfig(), username="klaxon-pair")
    lacking = [(Operation.WRITE, Kind.TOPIC, "klaxon.pairs"), (Operation.READ, Kind.GROUP, "klaxon-pair")]
    assert denial(kafka, lacking, "pair").startswith(
        "User:klaxon-pair may not read group klaxon-pair, write topic klaxon.pairs, as role pair must: "
        "run `klaxon topics create --acls`"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TopicAuthorizationFailedError("klaxon.control"), "lacks a right on topic klaxon.control: run"),
        (TopicAuthorizationFailedError({"b", "a"}), "lacks a right on topic a, b: run"),
        (GroupAuthorizationFailedError("klaxon-gate"), "lacks a right on group klaxon-gate: run"),
        (TransactionalIdAuthorizationFailed(), "lacks a right on transactional-id: run"),
    ],
)
def test_a_right_that_is_lost_on_the_way_is_named(error: Exception, told: str) -> None:
    said = denied(KafkaConfig(certificate_file="gate.pem"), error)
    assert said is not None
    assert said.startswith("the holder of gate.pem ")
    assert told in said
    assert denied(KafkaConfig(), KafkaConnectionError()) is None


def test_the_page_shows_the_table() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    shown = {
        (role, *cells)
        for role, *cells in re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    }
    assert shown == {(role, *_cells(role)) for role in ROLES}


def _cells(role: str) -> tuple[str, str, str]:
    """Topics it reads, topics it writes, and the rest."""
    named: dict[tuple[Operation, Kind], list[str]] = {}
    for grant in table():
        if grant.role == role:
            name = f"`{grant.resource.name.removeprefix('klaxon.')}{'*' * grant.resource.prefixed}`"
            named.setdefault((grant.operation, grant.resource.kind), []).append(name)
    reads, writes = (named.pop((one, Kind.TOPIC), []) for one in (Operation.READ, Operation.WRITE))
    rest = "; ".join(f"{operation} {kind} {', '.join(names)}" for (operation, kind), names in named.items())
    return ", ".join(reads) or "—", ", ".join(writes) or "—", rest or "—"


def page_rows() -> str:
    """The rows as docs/security.md has them: `python -c` this after a change of the table."""
    return "\n".join(f"| `{role}` | {' | '.join(_cells(role))} |" for role in ROLES)
