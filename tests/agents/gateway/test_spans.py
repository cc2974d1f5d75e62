"""Spans as the SDK's in-memory exporter receives them, and what they never hold."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from agents.gateway.otel_spans import CountedExporter, OtelSpans
from agents.gateway.settings import SpanSettings
from agents.gateway.spans import Answered, NoSpans, RequestSpan, Spans, spans_of
from tests.agents.gateway.answering import answering
from tests.agents.gateway.harness import until

CHAT = "/v1/chat/completions"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FIELDS = {
    "model": "what the client calls it",
    "messages": [{"role": "user", "content": "tell nobody"}],
    "stop": ["a secret stop"],
    "temperature": 0.7,
    "top_p": 1,
    "seed": 42,
    "max_tokens": 64,
    "n": 2,
    "stream": True,
    "user": "me@example.org",
}
END = Answered(
    status=200,
    ttft_us=84_100,
    input_tokens=12,
    output_tokens=34,
    cached_tokens=8,
    finish_reason="stop",
    response_id="chatcmpl-of-the-client",
    response_model="smollm2",
)


class Seen:
    """Spans with an exporter in memory."""

    def __init__(self, rate: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.spans = OtelSpans(
            SpanSettings(rate=rate), SimpleSpanProcessor(self.exporter), rollout="fp8", gateway="gateway-1"
        )

    def of(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return found

    def attributes(self, name: str) -> dict[str, Any]:
        return dict(self.of(name).attributes or {})

    def text(self) -> str:
        return "".join(span.to_json() for span in self.exporter.get_finished_spans())


@pytest.fixture
def seen() -> Iterator[Seen]:
    one = Seen()
    yield one
    one.spans._provider.shutdown()


def one_request(spans: Spans, came: dict[str, str] | None = None, end: Answered = END) -> dict[str, str]:
    with spans.request(came or {}, path=CHAT, fields=FIELDS, session="5e55", pair_id="0a1b") as span:
        with span.routed():
            span.goes_to(
                arm="canary",
                model_id="v2",
                node="canary-7",
                generation=3,
                mirrored=("canary", "baseline"),
                model="smollm2",
                why="weights",
            )
        with span.prechecked(hot_updated=True, load_us=4_250_000):
            sent = dict(span.headers())
        span.answered(end)
    return sent


def test_the_routing_entry_tells_group_and_model(seen: Seen) -> None:
    one_request(seen.spans)
    assert seen.attributes("model.route.grayscale") == {
        "ab_group": "canary",
        "model_id": "v2",
        "klaxon.arm": "canary",
        "klaxon.node": "canary-7",
        "klaxon.generation": 3,
        "klaxon.why": "weights",
    }


def test_before_inference_it_tells_what_was_newly_loaded(seen: Seen) -> None:
    one_request(seen.spans)
    assert seen.attributes("model.infer.precheck") == {"is_hot_updated": True, "load_duration_ms": 4250.0}


def test_an_engine_whose_load_nobody_saw_has_no_duration(seen: Seen) -> None:
    with (
        seen.spans.request({}, path=CHAT, fields={}) as span,
        span.prechecked(hot_updated=False, load_us=None),
    ):
        pass
    assert seen.attributes("model.infer.precheck") == {"is_hot_updated": False}


def test_the_request_has_the_genai_names(seen: Seen) -> None:
    one_request(seen.spans)
    assert seen.of("chat").kind is SpanKind.SERVER
    assert seen.attributes("chat") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "smollm2",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 1,
        "gen_ai.request.seed": 42,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": "5e55",
        "gen_ai.response.model": "smollm2",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.0841,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "http.response.status_code": 200,
        "klaxon.rollout": "fp8",
        "klaxon.pair_id": "0a1b",
        "klaxon.arm": "canary",
        "klaxon.node": "canary-7",
        "klaxon.generation": 3,
        "klaxon.model_version": "v2",
        "klaxon.mirrored": ("canary", "baseline"),
    }
    resource = seen.of("chat").resource.attributes
    assert dict(resource) == {"service.name": "klaxon-gateway", "service.instance.id": "gateway-1"}


def test_completions_are_an_operation_of_their_own(seen: Seen) -> None:
    with seen.spans.request({}, path="/v1/completions", fields={}):
        pass
    assert seen.attributes("text_completion")["gen_ai.operation.name"] == "text_completion"


def test_the_three_spans_are_one_trace_below_the_clients(seen: Seen) -> None:
    sent = one_request(seen.spans, {"traceparent": PARENT})
    spans = {span.name: span for span in seen.exporter.get_finished_spans()}
    traces = {f"{span.context.trace_id:032x}" for span in spans.values() if span.context}
    assert traces == {PARENT.split("-")[1]}
    request = spans["chat"]
    assert request.parent is not None
    assert request.context is not None
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    for child in ("model.route.grayscale", "model.infer.precheck"):
        parent = spans[child].parent
        assert parent is not None
        assert parent.span_id == request.context.span_id
    assert sent == {"traceparent": f"00-{PARENT.split('-')[1]}-{request.context.span_id:016x}-01"}


def test_a_client_that_samples_nothing_is_obeyed_and_its_trace_goes_on(seen: Seen) -> None:
    sent = one_request(seen.spans, {"traceparent": PARENT[:-1] + "0"})
    assert seen.exporter.get_finished_spans() == ()
    assert sent["traceparent"].startswith(PARENT[:36])
    assert sent["traceparent"].endswith("-00")


def test_without_a_parent_the_rate_decides() -> None:
    never = Seen(rate=0.0)
    one_request(never.spans)
    assert never.exporter.get_finished_spans() == ()
    one_request(never.spans, {"traceparent": PARENT})
    assert len(never.exporter.get_finished_spans()) == 3


def test_tracestate_passes_on_and_is_exported_nowhere(seen: Seen) -> None:
    sent = one_request(seen.spans, {"traceparent": PARENT, "tracestate": "vendor=sk-hidden"})
    assert sent["tracestate"] == "vendor=sk-hidden"
    assert "sk-hidden" not in seen.text()
    assert "tracestate" not in one_request(seen.spans, {"tracestate": "vendor=sk-hidden"}), "without a parent"
    bad = {"traceparent": PARENT, "tracestate": "a=b\r\nx-evil: 1"}
    assert "tracestate" not in one_request(seen.spans, bad)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
    ],
)
def test_a_trace_context_that_is_none_begins_a_new_trace(seen: Seen, traceparent: str) -> None:
    one_request(seen.spans, {"traceparent": traceparent})
    assert seen.of("chat").parent is None


def test_a_later_version_of_the_trace_context_is_read(seen: Seen) -> None:
    one_request(seen.spans, {"traceparent": "01" + PARENT[2:] + "-more"})
    assert seen.of("chat").parent is not None


def test_nothing_of_a_text_or_header_is_in_a_span(seen: Seen) -> None:
    came = {"traceparent": PARENT, "authorization": "Bearer sk-hidden", "x-request-id": "sk-hidden-too"}
    end = Answered(
        status=200,
        error="sk-hidden in an error",
        finish_reason="sk-hidden as a reason",
        response_id="chatcmpl-sk-hidden-too",
        response_model="sk-hidden model",
    )
    one_request(seen.spans, came, end)
    text = seen.text()
    for word in ("sk-hidden", "tell nobody", "a secret stop", "me@example.org", "what the client calls it"):
        assert word not in text
    assert seen.attributes("chat")["error.type"] == "other"
    assert seen.attributes("chat")["gen_ai.response.finish_reasons"] == ("other",)
    assert "gen_ai.response.model" not in seen.attributes("chat")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (Answered(status=200), None),
        (Answered(status=404), None),
        (Answered(status=499), None),
        (Answered(status=500), "500"),
        (Answered(status=200, error="cut"), "cut"),
        (Answered(status=504, error="timeout"), "timeout"),
    ],
)
def test_failures(seen: Seen, end: Answered, told: str | None) -> None:
    one_request(seen.spans, end=end)
    assert seen.attributes("chat").get("error.type") == told
    assert seen.of("chat").status.status_code is (StatusCode.UNSET if told is None else StatusCode.ERROR)


def test_what_breaks_off_is_told_by_its_type(seen: Seen) -> None:
    with (
        pytest.raises(asyncio.CancelledError),
        seen.spans.request({}, path=CHAT, fields={}) as span,
        span.routed(),
    ):
        raise asyncio.CancelledError("sk-hidden")
    for name in ("chat", "model.route.grayscale"):
        assert seen.attributes(name)["error.type"] == "CancelledError"
        assert not seen.of(name).events
    assert "sk-hidden" not in seen.text()


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@given(
    fields=st.dictionaries(st.sampled_from([*FIELDS, "top_k", "max_completion_tokens"]), HOSTILE),
    state=st.text(max_size=8),
    parent=st.text(max_size=8),
)
def test_whatever_is_asked_can_be_exported(fields: dict[str, Any], state: str, parent: str) -> None:
    """By the real encoder: a number that it cannot write would lose a whole batch of spans."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    one = Seen()
    with one.spans.request({"traceparent": parent, "tracestate": state}, path=CHAT, fields=fields) as span:
        assert set(span.headers()) <= {"traceparent", "tracestate"}
    assert encode_spans(one.exporter.get_finished_spans()).SerializeToString()


def test_off_costs_nothing() -> None:
    """One object for all requests, and OpenTelemetry is not even imported."""
    spans = spans_of(SpanSettings(), rollout="r", gateway="g")
    assert isinstance(spans, NoSpans)
    first: RequestSpan = spans.request({}, path=CHAT, fields={})
    assert first is spans.request({}, path=CHAT, fields={})
    assert one_request(spans, {"traceparent": PARENT}) == {}
    code = (
        "import sys; from agents.gateway import settings, spans;"
        "spans.spans_of(settings.SpanSettings(), rollout='r', gateway='g');"
        "print('opentelemetry' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


async def test_over_http_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a collector, with OpenTelemetry's own header variable; what waits leaves at the end."""
    monkeypatch.setattr("agents.gateway.otel_spans.EVERY_S", 3600)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20collector")
    got: list[tuple[str, str | None, bytes]] = []

    async def collect(request: web.Request) -> web.Response:
        body = await request.read()
        got.append((request.path, request.headers.get("authorization"), body))
        return web.Response()

    async with answering(collect) as (_, url, _):
        spans = spans_of(SpanSettings(endpoint=f"{url}/v1/traces"), rollout="r", gateway="g")
        for _ in range(5):
            one_request(spans)
        await spans.close()
        assert spans.gauges() == {"spans_exported": 15, "spans_lost": 0}
    ((path, credential, body),) = got
    assert (path, credential) == ("/v1/traces", "Bearer collector")
    assert body.count(b"model.route.grayscale") == 5


async def test_a_collector_that_hangs_or_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.gateway.otel_spans.TIMEOUT_S", 0.2)
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    async with answering(hang) as (_, url, _):
        spans = spans_of(SpanSettings(endpoint=f"{url}/v1/traces"), rollout="r", gateway="g")
        one_request(spans)
        async with asyncio.timeout(120):
            await spans.close()
        assert not released.is_set(), "the collector hangs still"
        assert spans.gauges()["spans_exported"] == 0
        released.set()
    away = spans_of(SpanSettings(endpoint="http://127.0.0.1:1/v1/traces"), rollout="r", gateway="g")
    one_request(away)
    async with asyncio.timeout(120):
        await away.close()
    # Its thread may go on for longer than its end was waited for.
    await until(lambda: away.gauges() == {"spans_exported": 0, "spans_lost": 3})


def test_lost_spans_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Collector(InMemorySpanExporter):
        takes = True

        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE

    collector = Collector()
    exporter = CountedExporter(collector)
    spans = OtelSpans(SpanSettings(), SimpleSpanProcessor(exporter), exporter, rollout="r", gateway="g")
    with caplog.at_level("INFO"):
        for takes in (True, False, False, True):
            collector.takes = takes
            one_request(spans)
    assert spans.gauges() == {"spans_exported": 6, "spans_lost": 6}
    assert [record.getMessage() for record in caplog.records] == [
        "spans are lost: the collector at gateway.spans.endpoint does not take them",
        "spans are exported again; 6 were lost so far",
    ]
    spans._provider.shutdown()
