# ruff: noqa: ARG002  (null objects use none of their arguments)
"""Spans of a request: the request itself, the routing decision, the look before inference (C6).

No attribute ever holds content: names of the configuration, versions, counts, times, sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

from agents.gateway.settings import SpanSettings


@dataclass(frozen=True, slots=True)
class Answered:
    """How a request ended, for its span; None is what the engine did not say."""

    status: int
    error: str | None = None
    """interface.md's class: timeout, connect, cut, …"""
    ttft_us: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    """Never exported: vLLM makes it of the client's own request id."""
    response_model: str | None = None
    """Exported where it is the model that the route's configuration or facts name."""


class RequestSpan(Protocol):
    """The span of one request; a context manager around all of it, to the last byte of the answer.

    An exception that leaves it is told by its type, never its text. Nothing here raises or blocks.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def routed(self) -> AbstractContextManager[object]:
        """`model.route.grayscale`, around the routing decision."""
        ...

    def goes_to(
        self,
        *,
        arm: str,
        model_id: str,
        node: str,
        generation: int | None,
        mirrored: tuple[str, ...],
        model: str | None = None,
        why: str | None = None,
    ) -> None:
        """Inside `routed`: what was decided. `model_id`: the arm's model version. `model`: its name as the
        configuration or the engine has it, never the client's. `why`: the routing's own word."""
        ...

    def prechecked(self, *, hot_updated: bool, load_us: int | None) -> AbstractContextManager[object]:
        """`model.infer.precheck`, around what happens between the decision and the answer's head."""
        ...

    def headers(self) -> Mapping[str, str]:
        """W3C trace context for the primary: it replaces the client's `traceparent` and `tracestate`. Empty:
        what the client sent passes on as it is."""
        ...

    def answered(self, answered: Answered) -> None:
        """Once, before the span ends."""
        ...


class Spans(Protocol):
    """Where spans come from."""

    def request(
        self,
        came: Mapping[str, str],
        *,
        path: str,
        fields: Mapping[str, Any],
        session: str | None = None,
        pair_id: str | None = None,
    ) -> RequestSpan:
        """`came`: the client's headers, for its trace context. Of the body (`fields`), only numbers among the
        sampling parameters are read. `session`: the keyed hash of it that events hold."""
        ...

    def gauges(self) -> dict[str, int]:
        """Spans that the collector has, and spans that it did not take."""
        ...

    async def close(self) -> None:
        """Send what is waiting, for a bounded time."""
        ...


class _NoSpan:
    """One for all requests: spans are off."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def routed(self) -> AbstractContextManager[object]:
        return _NOTHING

    def goes_to(self, **_: object) -> None:
        return None

    def prechecked(self, **_: object) -> AbstractContextManager[object]:
        return _NOTHING

    def headers(self) -> Mapping[str, str]:
        return {}

    def answered(self, answered: Answered) -> None:
        return None


class NoSpans:
    """Spans are off: nothing is made, nothing of OpenTelemetry is imported."""

    __slots__ = ()

    def request(
        self,
        came: Mapping[str, str],
        *,
        path: str,
        fields: Mapping[str, Any],
        session: str | None = None,
        pair_id: str | None = None,
    ) -> RequestSpan:
        return _NO_SPAN

    def gauges(self) -> dict[str, int]:
        return span_gauges()

    async def close(self) -> None:
        return None


def span_gauges(exported: int = 0, lost: int = 0) -> dict[str, int]:
    """By name; the names are there while spans are off, too."""
    return {"spans_exported": exported, "spans_lost": lost}


def spans_of(settings: SpanSettings, *, rollout: str, gateway: str) -> Spans:
    """As configured. With an endpoint it starts the thread that exports."""
    if settings.endpoint is None:
        return NoSpans()
    from agents.gateway.otel_spans import exporting_spans  # costs nothing while spans are off

    return exporting_spans(settings, rollout=rollout, gateway=gateway)


_NOTHING = nullcontext()
_NO_SPAN = _NoSpan()
