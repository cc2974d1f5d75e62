"""Excluded segments, held against requests; input tokens, estimated before an engine counts them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.segments import (
    UNBOUNDED_TOKENS,
    Exclusions,
    TokenEstimates,
    Traffic,
    sampling_class,
)
from agents.gateway.settings import EngineSettings, PoolSettings
from pipeline.core.cells import CONTEXT_LIMITS, context_class
from pipeline.core.gate.left_out import place_of
from pipeline.core.gate.rules import LOCATING
from schemas.control import Segment

HOUR_US = 3_600_000_000


def pool(hardware: str | None = None, region: str | None = None) -> PoolSettings:
    engines = tuple(EngineSettings(node=node, url=f"http://{node}") for node in ("gpu-1", "gpu-2|a"))
    return PoolSettings(
        arm="canary", kind="vllm", model_version="v2", hardware=hardware, region=region, engines=engines
    )


def traffic(
    most_tokens: int = 100, request_type: str = "chat", temperature: float | None = 0.0, body_bytes: int = 400
) -> Traffic:
    return Traffic(request_type, sampling_class(temperature), "m", body_bytes, most_tokens)


def excluding(*segments: tuple[str, str]) -> Exclusions:
    return Exclusions.of(Segment(dimension=dimension, value=value) for dimension, value in segments)


@pytest.mark.parametrize("limit", CONTEXT_LIMITS)
def test_a_context_is_over_its_limit_not_at_it(limit: int) -> None:
    held = excluding(("context", f">{limit}"))
    assert [held.hold(traffic(tokens), pool()) for tokens in (limit - 1, limit, limit + 1)] == [
        False,
        False,
        True,
    ]
    assert held.hold(None, pool()), "of what nothing is known it counts as inside"
    assert not held.by_node


def test_of_several_contexts_the_widest_holds() -> None:
    held = excluding(("context", ">8192"), ("context", ">512"), ("context", ">2048"))
    assert (held.hold(traffic(512), pool()), held.hold(traffic(513), pool())) == (False, True)


@pytest.mark.parametrize(
    ("segment", "inside", "outside"),
    [
        (("request_type", "chat"), traffic(), traffic(request_type="completion")),
        (("sampling", "greedy"), traffic(), traffic(temperature=0.1)),
        (("sampling", "sampled"), traffic(temperature=1e-9), traffic()),
        (("sampling", "unknown"), traffic(temperature=None), traffic()),
        (("request_type", "unknown"), traffic(request_type=""), traffic()),
    ],
)
def test_labels_of_a_request(segment: tuple[str, str], inside: Traffic, outside: Traffic) -> None:
    held = excluding(segment)
    assert (held.hold(inside, pool()), held.hold(outside, pool())) == (True, False)
    assert held.hold(None, pool())


@pytest.mark.parametrize("dimension", ["hardware", "region"])
def test_labels_of_a_pool(dimension: str) -> None:
    held, silent = excluding((dimension, "a")), excluding((dimension, "unknown"))
    for given_traffic in (traffic(), None):
        assert held.hold(given_traffic, pool(**{dimension: "a"}))
        assert not held.hold(given_traffic, pool(**{dimension: "b"}))
        assert not held.hold(given_traffic, pool())
        assert silent.hold(given_traffic, pool()), "cells call what is not stated so"


def test_nodes_and_their_contexts_exclude_single_engines() -> None:
    held = excluding(("node", "gpu-1"), ("node_context", "gpu-2|a|>2048"), ("node_context", "gpu-2|a|>512"))
    assert held.by_node
    assert not held.hold(traffic(9_000), pool())
    assert held.hold_on(traffic(1), "gpu-1")
    assert [held.hold_on(traffic(tokens), "gpu-2|a") for tokens in (512, 513)] == [False, True]
    assert held.hold_on(None, "gpu-2|a")
    assert not held.hold_on(None, "gpu-3")


@pytest.mark.parametrize(
    "segment",
    [
        ("mood", "bad"), ("context", "<=512"), ("context", ">"), ("context", ">-1"), ("context", "> 5"),
        ("context", ">1e3"), ("context", "a|>512"), ("context", "|>512"), ("node_context", ">512"),
        ("node_context", "|>512"), ("node_context", "gpu-1|512"), ("context", ">²"), ("context", ">512\n"),
        ("", ""), ("stratum", "chat|<=512|greedy|none|h200"), ("traffic", "user"),
    ],
)  # fmt: skip
def test_what_is_not_understood_contains_everything(segment: tuple[str, str]) -> None:
    """A gateway that is older than its gate keeps the canary from what it cannot tell."""
    held = excluding(("context", ">8192"), segment)
    assert held.not_understood == 1
    assert held.hold(traffic(1), pool())


def test_nothing_excluded_holds_nothing() -> None:
    held = excluding()
    assert held == Exclusions()
    assert not held.hold(None, pool())
    assert not held.hold(traffic(UNBOUNDED_TOKENS), pool())


VALUES: Mapping[str, tuple[str, ...]] = {
    "node": ("gpu-1", "gpu-2|a", "gpu-3"),
    "context": tuple(f">{limit}" for limit in CONTEXT_LIMITS),
    "request_type": ("chat", "completion"),
    "hardware": ("h200", "unknown"),
    "sampling": ("greedy", "sampled", "unknown"),
    "region": ("eu", "unknown"),
    "node_context": tuple(f"{node}|>{limit}" for node in ("gpu-1", "gpu-2|a") for limit in CONTEXT_LIMITS),
}


def cells_of(
    tokens: int, request_type: str, temperature: float | None, at: PoolSettings, node: str
) -> set[tuple[str, str]]:
    """The cells that the request's events would count in, as architecture.md defines them."""
    contexts = [f">{limit}" for limit in (512, 2048, 4096, 8192) if tokens > limit]
    return {
        ("node", node),
        ("request_type", request_type),
        ("hardware", at.hardware or "unknown"),
        ("region", at.region or "unknown"),
        ("sampling", "unknown" if temperature is None else "sampled" if temperature else "greedy"),
        *(("context", context) for context in contexts),
        *(("node_context", f"{node}|{context}") for context in contexts),
    }


@given(
    st.sets(
        st.sampled_from([(dimension, value) for dimension, values in VALUES.items() for value in values]),
        max_size=6,
    ),
    st.sampled_from([1, 512, 513, 2048, 2049, 4096, 4097, 8192, 8193, 10**6]),
    st.sampled_from(["chat", "completion"]),
    st.sampled_from([None, 0.0, 0.7]),
    st.sampled_from([None, "h200", "eu"]),
)
def test_a_request_is_excluded_exactly_where_its_cells_are(
    segments: set[tuple[str, str]],
    tokens: int,
    request_type: str,
    temperature: float | None,
    label: str | None,
) -> None:
    """Of what is known the gateway's segments are the gate's cells."""
    held, at = excluding(*segments), pool(hardware=label, region=label)
    asked = traffic(tokens, request_type, temperature)
    for engine in at.engines:
        excluded = held.hold(asked, at) or held.hold_on(asked, engine.node)
        assert excluded == bool(segments & cells_of(tokens, request_type, temperature, at, engine.node))


def test_every_class_that_a_gate_may_exclude_is_understood() -> None:
    """The gate narrows to what it locates; contexts are its own."""
    assert set(VALUES) == set(LOCATING)
    assert context_class(10**6) == f">{CONTEXT_LIMITS[-1]}"
    for dimension, values in VALUES.items():
        for value in values:
            assert excluding((dimension, value)).not_understood == 0
            known = place_of((dimension, value))
            if known is not None and dimension in ("context", "node_context"):
                held = excluding((dimension, value))
                limit = held.over if known.node is None else held.over_on[known.node]
                assert limit == known.limit


def test_sampling_classes_are_the_cells_own() -> None:
    assert [sampling_class(value) for value in (None, 0, 0.0, 1e-9, 2)] == [
        "unknown", "greedy", "greedy", "sampled", "sampled",
    ]  # fmt: skip


def body(**fields: object) -> dict[str, object]:
    return {"model": "m", **fields}


def asked(estimates: TokenEstimates, size: int, **fields: object) -> Traffic:
    return estimates.traffic("chat", 0.0, body(**fields), size)


def test_an_unknown_model_has_a_token_a_byte_and_a_template() -> None:
    estimates = TokenEstimates()
    assert asked(estimates, 256).most_tokens == 512
    assert asked(estimates, 257).most_tokens == 513
    assert asked(estimates, 1).most_tokens == 512, "so the shortest is in no excluded context"


def taught(densities: list[float], size: int = 4_000) -> TokenEstimates:
    estimates = TokenEstimates()
    for at, density in enumerate(densities):
        estimates.learn(asked(estimates, size), round(size * density), 10, at)
    return estimates


def test_from_a_hundred_requests_on_it_is_what_was_counted() -> None:
    assert asked(taught([0.25] * 99), 4_000).most_tokens == 4_256
    found = asked(taught([0.25] * 100), 4_000).most_tokens
    assert 1_000 <= found <= 1_051, "a bin is 5 % wide, and its upper edge counts"


@given(st.lists(st.floats(0.01, 3.5), min_size=100, max_size=600))
def test_one_request_in_a_hundred_may_be_denser(densities: list[float]) -> None:
    """Against sorted counts: the bound is that of the 99th percentile, at most a bin over it."""
    most = asked(taught(densities), 4_000).most_tokens
    counts = sorted(round(4_000 * density) for density in densities)
    assert sum(count > most for count in counts) <= len(counts) / 100
    at_least = counts[len(counts) - 1 - len(counts) // 100]
    assert most <= max(at_least, 4_000 / 64) * 1.0501 + 1


def test_what_was_served_lately_weighs_more() -> None:
    estimates = taught([1.0] * 2_000 + [0.25] * 14_000)
    assert asked(estimates, 4_000).most_tokens <= 1_051
    stale = taught([1.0] * 2_000 + [0.25] * 500)
    assert asked(stale, 4_000).most_tokens >= 4_000


def test_pictures_sound_and_files_have_no_bound_and_teach_nothing() -> None:
    estimates = taught([0.25] * 100)
    parts = [[{"type": "image_url", "image_url": {"url": "http://x"}}], ["text"], [{"text": "a"}], [None]]
    for content in parts:
        seen = asked(estimates, 600, messages=[{"content": "a"}, {"content": content}])
        assert seen.most_tokens == UNBOUNDED_TOKENS
        for at in range(200):
            estimates.learn(seen, 5_000, 10, at)
    assert asked(estimates, 4_000).most_tokens <= 1_051
    text = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert asked(estimates, 4_000, messages=text).most_tokens <= 1_051


@pytest.mark.parametrize(
    "messages", [None, 3, "a", [], [3], [None], [{}], [{"content": None}], [{"content": 3}]]
)
def test_a_body_of_wrong_types_is_still_a_request(messages: object) -> None:
    estimates = TokenEstimates()
    assert estimates.traffic("chat", None, {"model": 3, "messages": messages}, 300).most_tokens == 556


@pytest.mark.parametrize(("tokens", "output"), [(0, 1), (-1, 1), (2**24 + 1, 1), (1, -1), (1, 2**24 + 1)])
def test_counts_that_no_request_has_teach_nothing(tokens: int, output: int) -> None:
    estimates = TokenEstimates()
    estimates.learn(asked(estimates, 400), tokens, output, 0)
    assert estimates.gauges() == {"token_estimate_models": 0}


def test_more_tokens_than_any_text_has_bound_nothing() -> None:
    assert asked(taught([4.0] * 100), 4_000).most_tokens == UNBOUNDED_TOKENS


def test_short_bodies_teach_output_alone_and_are_bounded_as_the_shortest_that_teach() -> None:
    estimates = taught([0.5] * 100, size=256)
    for at in range(200):
        estimates.learn(asked(estimates, 255), 1_000, 10, at)
    assert asked(estimates, 10).most_tokens == asked(estimates, 256).most_tokens <= 135


def test_expected_tokens_are_the_mean() -> None:
    estimates = TokenEstimates()
    seen = asked(estimates, 1_000)
    assert estimates.expected_tokens(seen, None) == 250 + 256
    assert [estimates.expected_tokens(seen, most) for most in (0, 10, 10_000)] == [250, 260, 506]
    assert estimates.expected_tokens(asked(estimates, 0), 0) == 1
    source = random.Random(5)
    for at in range(2_000):
        estimates.learn(seen, source.choice([100, 300]), source.choice([40, 60]), at)
    assert 240 <= estimates.expected_tokens(seen, None) <= 260, "0.2 tokens a byte, 50 tokens of output"


def test_models_are_bounded_and_expire() -> None:
    estimates = TokenEstimates()

    def learn(model: str, mono_us: int) -> None:
        estimates.learn(estimates.traffic("chat", 0, {"model": model}, 400), 100, 10, mono_us)

    for at in range(1_000):
        learn(f"m{at}", at)
    assert estimates.gauges() == {"token_estimate_models": 64}
    learn("new", 999 + HOUR_US - 1)
    assert estimates.gauges() == {"token_estimate_models": 2}
    learn("newer", 999 + HOUR_US)
    assert estimates.gauges() == {"token_estimate_models": 2}
    learn("back", 0)
    assert estimates.gauges() == {"token_estimate_models": 3}, "a clock that goes back forgets nothing"
    long = "x" * 100_000
    assert estimates.traffic("chat", 0, {"model": long}, 400).model == long[:256]
