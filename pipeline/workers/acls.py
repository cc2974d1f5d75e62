"""Granting the rights of the table on a broker, and comparing what is granted there with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaError,
    NoError,
    SecurityDisabled,
    for_code,
)
from aiokafka.protocol.admin import DescribeAclsRequest

from pipeline.config import Config, KafkaConfig, PrincipalsConfig
from pipeline.workers.acl_table import CLUSTER_NAME, Grant, Kind, Operation, Resource, role_key, table
from pipeline.workers.broker import BrokerError, away, bare_client
from pipeline.workers.kafka_requests import AclRow, CreateAcls
from pipeline.workers.rights import who
from schemas.topics import Topic

ANY: Final = 1
LITERAL: Final = 3
PREFIXED: Final = 4
DENY: Final = 2
ALLOW: Final = 3
EVERY_HOST: Final = "*"
EVERYTHING: Final = "*"
"""The literal name that stands for all of a kind."""
HARMLESS: Final = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
"""What others may do without a word, like what follows. (Whoever reads in a group moves its offsets.)"""


ALSO_HARMLESS: Final = ((Operation.READ, Kind.TOPIC), (Operation.IDEMPOTENT_WRITE, Kind.CLUSTER))
GRANT: Final = "run `klaxon topics create --acls`"
BROKERS_OWN: Final = "unless that is a broker, whoever may change the cluster can give itself every right:"


class NoAuthorizerError(BrokerError):
    """The broker keeps no rights: everybody may do everything."""


@dataclass(frozen=True, slots=True)
class AclProblem:
    """Where a broker's rights are not the table's."""

    what: str
    remedy: str
    missing: bool
    """Somebody cannot work; else somebody may more than he needs."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One right as a broker keeps it."""

    principal: str
    operation: Operation
    resource: Resource
    host: str = EVERY_HOST
    denies: bool = False

    def __str__(self) -> str:
        at = "" if self.host == EVERY_HOST else f" from {self.host}"
        return f"{self.principal} may {'not ' * self.denies}{self.operation} {self.resource}{at}"


def wanted(principals: PrincipalsConfig, grants: Iterable[Grant]) -> frozenset[Acl]:
    """The table with principals in place of roles."""
    return frozenset(
        Acl(getattr(principals, role_key(one.role)), one.operation, one.resource) for one in grants
    )


async def create_acls(config: Config) -> tuple[Acl, ...]:
    """Grant what the table says and the broker does not; returns those. Takes nothing from anybody.

    Raises BrokerAwayError, BrokerError (no authorizer; not for us to grant).
    """
    kafka = config.kafka
    async with bare_client(kafka) as client:
        try:
            missing = sorted(wanted(config.principals, table()) - await _granted(client, kafka))
            if missing:
                request = CreateAcls([_row(one) for one in missing])
                answer = await client.send(client.get_random_node(), request)
                for (code, message), acl in zip(answer.creation_responses, missing, strict=True):
                    _raise_for(code, message, kafka, f"{acl}: not granted")
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    return tuple(missing)


async def acl_problems(config: Config) -> tuple[AclProblem, ...]:
    """Where the broker's rights differ from the table; raises as `create_acls` does."""
    async with bare_client(config.kafka) as client:
        try:
            found = await _granted(client, config.kafka)
        except (KafkaError, OSError) as error:
            raise away(config.kafka, error) from None
    return tuple(differences(wanted(config.principals, table()), found))


def differences(should: frozenset[Acl], found: frozenset[Acl]) -> list[AclProblem]:
    """Rights that are missing, others that change what is ours or who may, what forbids a needed one."""
    lacking: dict[str, list[str]] = {}
    for acl in sorted(should - found):
        lacking.setdefault(acl.principal, []).append(f"{acl.operation} {acl.resource}")
    problems = [
        AclProblem(f"{principal} may not {', '.join(what)}", GRANT, missing=True)
        for principal, what in lacking.items()
    ]
    ours = [Resource(Kind.TOPIC, topic.value) for topic in Topic]
    ours += [acl.resource for acl in should if acl.resource.kind in (Kind.GROUP, Kind.TRANSACTIONAL_ID)]
    ours.append(Resource(Kind.CLUSTER, CLUSTER_NAME))
    for acl in sorted(found - should):
        harmless = (acl.operation, acl.resource.kind) in ALSO_HARMLESS or acl.operation in HARMLESS
        if harmless and not acl.denies:
            continue
        if any(_overlap(acl.resource, resource) for resource in ours):
            of_all = acl.resource.kind is Kind.CLUSTER and not acl.denies
            remedy = f"{BROKERS_OWN} " * of_all + "take it away with Kafka's kafka-acls.sh --remove"
            problems.append(AclProblem(f"not in the table: {acl}", remedy, missing=False))
    return problems


def _overlap(one: Resource, other: Resource) -> bool:
    """Whether some name belongs to both."""
    if one.kind is not other.kind:
        return False
    if EVERYTHING in (one.name, other.name):
        return True
    shorter, longer = sorted((one, other), key=lambda resource: len(resource.name))
    return longer.name.startswith(shorter.name) if shorter.prefixed else shorter.name == longer.name


async def _granted(client: Any, kafka: KafkaConfig) -> frozenset[Acl]:
    """Every right the broker keeps on topics, groups, transactional ids and the cluster."""
    request = DescribeAclsRequest(ANY, None, ANY, None, None, ANY, ANY)  # None: any
    answer = await client.send(client.get_random_node(), request)
    _raise_for(answer.error_code, answer.error_message, kafka, "the rights granted cannot be read")
    return frozenset(
        Acl(
            principal,
            Operation(operation),
            Resource(Kind(kind), name, pattern == PREFIXED),
            host,
            denies=permission == DENY,
        )
        for kind, name, pattern, acls in answer.resources
        if kind in set(Kind)
        for principal, host, operation, permission in acls
        if operation in set(Operation)
    )


def _row(acl: Acl) -> AclRow:
    resource = acl.resource
    pattern = PREFIXED if resource.prefixed else LITERAL
    return (resource.kind, resource.name, pattern, acl.principal, acl.host, acl.operation, ALLOW)


def _raise_for(code: int, message: str | None, kafka: KafkaConfig, what: str) -> None:
    error = for_code(code)
    if error is NoError:
        return
    if error is SecurityDisabled:
        raise NoAuthorizerError(
            f"Kafka at {kafka.bootstrap} has no authorizer, so anybody may do anything there: set "
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer on every node"
        )
    if error is ClusterAuthorizationFailedError:
        raise BrokerError(
            f"{what}: {who(kafka)} may not describe and alter the cluster's rights; run this as a super user "
            "of the brokers"
        )
    raise BrokerError(f"{what}: {message or error.__name__} at {kafka.bootstrap}")
