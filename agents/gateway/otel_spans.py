"""Spans by OpenTelemetry, exported over OTLP/HTTP in batches by a thread of its own.

`gen_ai.*` as in the GenAI conventions (development status: their names stand here and nowhere else), ours
under `klaxon.*`; `ab_group`, `model_id`, `is_hot_updated` and `load_duration_ms` are capability C6's. What a
client or an engine calls something is never an attribute: sampling parameters only where they are numbers,
errors and finish reasons only of the known classes, no response id, no `tracestate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags, Tracer

from agents.gateway.events import ERRORS, FINISHES, OTHER
from agents.gateway.settings import SpanSettings
from agents.gateway.spans import Answered, span_gauges
from schemas.plain import Log

log: Log = logging.getLogger(__name__)

QUEUE_SPANS: Final = 4_096
"""Ended spans that wait for the exporter; further ones are left out."""
BATCH_SPANS: Final = 512
EVERY_S: Final = 2.0
TIMEOUT_S: Final = 5.0
"""Of one export, and of closing."""

_OPERATIONS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_NUMBERS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,512}")


def exporting_spans(settings: SpanSettings, *, rollout: str, gateway: str) -> OtelSpans:
    """With an exporter to `settings.endpoint`, which is not asked anything yet.

    Headers for the collector (its credential): OpenTelemetry's own `OTEL_EXPORTER_OTLP_HEADERS`.
    """
    # Its own lines come with every attempt and name no remedy.
    logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
    exporter = CountedExporter(OTLPSpanExporter(endpoint=settings.endpoint, timeout=TIMEOUT_S))
    batches = BatchSpanProcessor(
        exporter,
        max_queue_size=QUEUE_SPANS,
        schedule_delay_millis=EVERY_S * 1_000,
        max_export_batch_size=BATCH_SPANS,
    )
    return OtelSpans(settings, batches, exporter, rollout=rollout, gateway=gateway)


class CountedExporter(SpanExporter):
    """Counts what its exporter sends and loses, and says when that begins and ends. Used by one thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.exported = 0
        self.lost = 0
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One batch. Blocks for at most about TIMEOUT_S."""
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self.lost += len(spans)
        else:
            self.exported += len(spans)
        if failed and not self._failing:
            log.warning("spans are lost: the collector at gateway.spans.endpoint does not take them")
        elif self._failing and not failed:
            log.info("spans are exported again; %d were lost so far", self.lost)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """No more."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is held here."""
        return self._exporter.force_flush(timeout_millis)


class OtelSpans:
    """Spans of one gateway, handed to `processor` as they end."""

    def __init__(
        self,
        settings: SpanSettings,
        processor: SpanProcessor,
        exporter: CountedExporter | None = None,
        *,
        rollout: str,
        gateway: str,
    ) -> None:
        """`exporter`: what the processor hands them to, for the counts."""
        resource = Resource({"service.name": settings.service_name, "service.instance.id": gateway})
        limits = SpanLimits(max_span_attributes=48, max_events=0, max_links=0, max_attribute_length=256)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.rate)),
            resource=resource,
            shutdown_on_exit=False,
            span_limits=limits,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("klaxon.gateway")
        self._rollout = rollout
        self._exporter = exporter

    def request(
        self,
        came: Mapping[str, str],
        *,
        path: str,
        fields: Mapping[str, Any],
        session: str | None = None,
        pair_id: str | None = None,
    ) -> _RequestSpan:
        """The span starts now."""
        parent = _parent_of(came.get("traceparent"))
        state = came.get("tracestate")
        kept = state if parent is not None and state is not None and _TRACESTATE.fullmatch(state) else None
        operation = _OPERATIONS.get(path, "other")
        span = self._tracer.start_span(
            operation,
            context=None if parent is None else trace.set_span_in_context(NonRecordingSpan(parent)),
            kind=SpanKind.SERVER,
        )
        if span.is_recording():
            span.set_attributes(
                {"gen_ai.operation.name": operation, "klaxon.rollout": self._rollout}
                | _numbers(fields)
                | {"gen_ai.request.stream": fields.get("stream") is True}
                | ({} if session is None else {"gen_ai.conversation.id": session})
                | ({} if pair_id is None else {"klaxon.pair_id": pair_id})
            )
        return _RequestSpan(self._tracer, span, kept)

    def gauges(self) -> dict[str, int]:
        """Since the start."""
        exporter = self._exporter
        return span_gauges() if exporter is None else span_gauges(exporter.exported, exporter.lost)

    async def close(self) -> None:
        """Exports what waits, for TIMEOUT_S at most: a collector that hangs does not hold up the end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=shut_down, name="spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await ended.wait()


@dataclass(slots=True)
class _RequestSpan:
    _tracer: Tracer
    _span: Span
    _tracestate: str | None
    _route: Span | None = None
    _model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        _end(self._span, error[0])

    def routed(self) -> _Child:
        """A span from now until the block's end."""
        self._route = self._child("model.route.grayscale")
        return _Child(self._route)

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
        """On the routing's span and, what describes the request, on the request's."""
        self._model = model
        shared: dict[str, Any] = {"klaxon.arm": arm, "klaxon.node": node}
        if generation is not None:
            shared["klaxon.generation"] = generation
        if self._route is not None:
            reason = {} if why is None else {"klaxon.why": why}
            self._route.set_attributes({"ab_group": arm, "model_id": model_id} | shared | reason)
        self._span.set_attributes(
            shared
            | {"klaxon.model_version": model_id, "klaxon.mirrored": list(mirrored)}
            | ({} if model is None else {"gen_ai.request.model": model})
        )

    def prechecked(self, *, hot_updated: bool, load_us: int | None) -> _Child:
        """A span from now until the block's end."""
        span = self._child("model.infer.precheck")
        span.set_attribute("is_hot_updated", hot_updated)
        if load_us is not None:
            span.set_attribute("load_duration_ms", load_us / 1_000)
        return _Child(span)

    def headers(self) -> Mapping[str, str]:
        """Ours, whether it is recorded or not; the client's `tracestate` stays beside a parent of its own."""
        context = self._span.get_span_context()
        came = {} if self._tracestate is None else {"tracestate": self._tracestate}
        return {
            "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        } | came

    def answered(self, answered: Answered) -> None:
        """Attributes of the end."""
        counts = {
            "http.response.status_code": answered.status,
            "gen_ai.usage.input_tokens": answered.input_tokens,
            "gen_ai.usage.output_tokens": answered.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": answered.cached_tokens,
        }
        said: dict[str, Any] = {name: value for name, value in counts.items() if value is not None}
        if answered.ttft_us is not None:
            said["gen_ai.response.time_to_first_chunk"] = answered.ttft_us / 1_000_000
        if answered.finish_reason is not None:
            reason = answered.finish_reason
            said["gen_ai.response.finish_reasons"] = [reason if reason in FINISHES else OTHER]
        if self._model is not None and answered.response_model == self._model:
            said["gen_ai.response.model"] = self._model
        self._span.set_attributes(said)
        if answered.error is not None:
            _failed(self._span, answered.error if answered.error in ERRORS else OTHER)
        elif answered.status >= 500:
            _failed(self._span, str(answered.status))

    def _child(self, name: str) -> Span:
        return self._tracer.start_span(name, context=trace.set_span_in_context(self._span))


@dataclass(frozen=True, slots=True)
class _Child:
    """Ends a span with a block."""

    span: Span

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        _end(self.span, error[0])


def _end(span: Span, kind: object) -> None:
    if isinstance(kind, type):
        _failed(span, kind.__name__)
    span.end()


def _failed(span: Span, what: str) -> None:
    span.set_attribute("error.type", what)
    span.set_status(StatusCode.ERROR)


def _numbers(fields: Mapping[str, Any]) -> dict[str, int | float]:
    """Sampling parameters that are numbers, in the range that an exporter can write."""
    found: dict[str, int | float] = {}
    for name, attribute in _NUMBERS.items():
        value = fields.get(name)
        if isinstance(value, bool):
            continue
        if (isinstance(value, int) and -(2**63) <= value < 2**63) or (
            isinstance(value, float) and math.isfinite(value)
        ):
            found[attribute] = value
    return found


def _parent_of(traceparent: str | None) -> SpanContext | None:
    """W3C trace context, level 1; None: there is none, or none that is valid."""
    match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    sampled = TraceFlags(int(flags, 16) & TraceFlags.SAMPLED)
    context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled)
    return context if context.is_valid else None
