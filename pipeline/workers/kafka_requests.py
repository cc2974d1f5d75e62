"""Requests of Kafka's protocol that aiokafka has no call for, on its classes for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from aiokafka.protocol.admin import CreateAclsRequest_v1, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int16, Int32, Schema, String

AclRow = tuple[int, str, int, str, str, int, int]
"""Kind, name, pattern type, principal, host, operation, permission."""


class CreateAcls(Request[CreateAclsRequest_v1]):
    """Any number of rights in one request; aiokafka's own takes one."""

    API_KEY = 30

    def __init__(self, rows: Sequence[AclRow]) -> None:
        self._rows = list(rows)

    def build(self, request_struct_class: type[CreateAclsRequest_v1]) -> CreateAclsRequest_v1:
        return request_struct_class(self._rows)


class MetadataResponseV8(Response):
    """With what the asker may do (KIP-430), as a bit per operation."""

    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", Array(("node_id", Int32), ("host", String()), ("port", Int32), ("rack", String()))),
        ("cluster_id", String()),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("topic", String()),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("authorized_operations", Int32),
    )


class MetadataRequestV8(RequestStruct):
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = MetadataResponseV8
    SCHEMA = Schema(
        ("topics", Array(String())),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class DescribeTopics(Request[MetadataRequestV8]):
    """These topics, and what the asker may do with each and the cluster. Creates none."""

    API_KEY = 3

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = list(topics)

    def build(self, request_struct_class: type[MetadataRequestV8]) -> MetadataRequestV8:
        return request_struct_class(self._topics, False, True, True)


class DescribeGroupsRequestV3(RequestStruct):
    """aiokafka's own names the answer of version 2."""

    API_KEY = 15
    API_VERSION = 3
    RESPONSE_TYPE = DescribeGroupsResponse_v3
    SCHEMA: ClassVar[Schema] = Schema(("groups", Array(String())), ("include_authorized_operations", Boolean))


class DescribeGroup(Request[DescribeGroupsRequestV3]):
    """A group and what the asker may do with it; ask its coordinator."""

    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: type[DescribeGroupsRequestV3]) -> DescribeGroupsRequestV3:
        return request_struct_class([self._group], True)
