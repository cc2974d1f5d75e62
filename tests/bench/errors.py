"""What ends a measurement."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement did not come to its end, or what was measured is not what should have been."""


class BrokerAbsentError(Exception):
    """Apache Kafka could not be started; the message says what its script said."""
