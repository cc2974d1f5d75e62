"""The table of rights, `acls.txt`: which role may do what on which topic, group or transactional id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final

from pipeline.config import PrincipalsConfig
from pipeline.errors import PipelineError
from schemas.topics import Topic

FILE: Final = Path(__file__).with_name("acls.txt")


class Operation(IntEnum):
    """What may be done, by Kafka's numbers."""

    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


class Kind(IntEnum):
    """What it is done to, by Kafka's numbers."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


OPERATIONS: Final = {str(one): one for one in Operation}
KINDS: Final = {str(one): one for one in Kind}
CLUSTER_NAME: Final = "kafka-cluster"
"""What Kafka calls the one cluster there is."""
DESCRIBING: Final = (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER)
"""Whoever may do one of these may describe, too."""


@dataclass(frozen=True, slots=True, order=True)
class Resource:
    """One thing, or (`prefixed`) everything whose name begins so."""

    kind: Kind
    name: str
    prefixed: bool = False

    def covers(self, kind: Kind, name: str) -> bool:
        """Whether this thing is among them."""
        return kind is self.kind and (name.startswith(self.name) if self.prefixed else name == self.name)

    def __str__(self) -> str:
        return (
            str(self.kind) if self.kind is Kind.CLUSTER else f"{self.kind} {self.name}{'*' * self.prefixed}"
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """A row."""

    role: str
    operation: Operation
    resource: Resource


class AclTableError(PipelineError):
    """The table of rights cannot be read; the message names its line."""


@cache
def table() -> tuple[Grant, ...]:
    """The table as shipped. Reads a small file, once."""
    return read_table(FILE.read_text(encoding="utf-8"))


def read_table(text: str) -> tuple[Grant, ...]:
    """The rows in their order; raises AclTableError."""
    grants: list[Grant] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        grant = _grant(words)
        if isinstance(grant, str):
            raise AclTableError(f"acls.txt:{number}: {grant}")
        if grant in grants:
            raise AclTableError(f"acls.txt:{number}: stands twice")
        grants.append(grant)
    return tuple(grants)


def _grant(words: list[str]) -> Grant | str:
    """One row, or what is wrong with it."""
    if len(words) < 3:
        return "a row is: role, operation, kind, name"
    role, operation, kind, *names = words
    if role_key(role) not in PrincipalsConfig.__struct_fields__:
        return f"no role {role!r}; known: {', '.join(ROLES)}"
    if operation not in OPERATIONS:
        return f"no operation {operation!r}; known: {', '.join(OPERATIONS)}"
    if kind not in KINDS:
        return f"nothing is a {kind!r}; known: {', '.join(KINDS)}"
    found = KINDS[kind]
    if len(names) != (found is not Kind.CLUSTER):
        return "a cluster has no name" if found is Kind.CLUSTER else f"a {kind} has one name"
    name = CLUSTER_NAME if found is Kind.CLUSTER else names[0]
    resource = Resource(found, name.removesuffix("*"), name.endswith("*"))
    if found is Kind.TOPIC and not any(resource.covers(found, topic.value) for topic in Topic):
        return f"no topic {name!r}; known: {', '.join(Topic)}"
    return Grant(role, OPERATIONS[operation], resource)


def role_key(role: str) -> str:
    """A role's key in the configuration."""
    return role.replace("-", "_")


ROLES: Final = tuple(key.replace("_", "-") for key in PrincipalsConfig.__struct_fields__)


def granted(grants: Iterable[Grant], role: str, kind: Kind, name: str) -> frozenset[Operation]:
    """What a role may do to one thing, what follows from it included."""
    found = {one.operation for one in grants if one.role == role and one.resource.covers(kind, name)}
    if found & {*DESCRIBING}:
        found.add(Operation.DESCRIBE)
    return frozenset(found)
