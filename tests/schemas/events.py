"""Hypothesis strategies of events, and equality of columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from schemas.columns import LABELS, LabelColumn
from schemas.events import ARMS, LogitEvent, NodeEvent, RequestEvent

SMALL = st.integers(0, 2**31 - 1)
TEXT = st.text(max_size=12)
NAME = st.text(min_size=1, max_size=12)
HEX32 = st.integers(0, 2**128 - 1).map(lambda x: f"{x:032x}")
DURATION = st.integers(0, 86_400_000_000)
OPTIONAL_TEXT = st.none() | TEXT
REQUIRED_LABELS = {"rollout": NAME, "node": NAME, "model_version": NAME}


def labels() -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys(LABELS, OPTIONAL_TEXT)
    fields.update(REQUIRED_LABELS)
    fields.update(
        arm=st.sampled_from(ARMS),
        signature=HEX32,
        pair_id=st.none() | HEX32 | TEXT,
        generation=st.none() | SMALL,
        ts_us=st.integers(0, 4_102_444_800_000_000),
        duration_us=DURATION,
        input_tokens=SMALL,
        cached_tokens=st.none() | SMALL,
        temperature=st.none() | st.floats(0, 100),
        top_p=st.none() | st.floats(0, 1),
        max_tokens=st.none() | SMALL,
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    )
    return fields


NUMBER = st.floats(allow_nan=False, allow_infinity=False)

request_events = st.builds(
    RequestEvent,
    v=st.just(1),
    **labels(),
    shadow=st.booleans(),
    status=st.integers(0, 999),
    error=OPTIONAL_TEXT,
    ttft_us=st.none() | DURATION,
    output_tokens=SMALL,
    itl_us=st.none() | DURATION,
    finish_reason=OPTIONAL_TEXT,
    stream=st.none() | st.booleans(),
    session=OPTIONAL_TEXT,
    prompt_id=OPTIONAL_TEXT,
    consent_id=OPTIONAL_TEXT,
    snapshot_id=OPTIONAL_TEXT,
    parse_depth=st.none() | st.integers(0, 1_000_000),
    similarity=st.none() | NUMBER,
    scores=st.none() | st.dictionaries(NAME, NUMBER, max_size=3),
)

LOGPROB = st.one_of(
    st.floats(-30, 0.0),
    st.floats(-30, 0.0).map(lambda x: round(x, 4)),
    st.sampled_from([None, -9999.0, 0.0, 0.5, 1e300, -1e300]),
)


@st.composite
def logit_events(draw: st.DrawFn) -> LogitEvent:
    positions = draw(st.integers(1, 4))
    even = draw(st.booleans())
    k = draw(st.integers(1, 7))
    as_bytes = draw(st.booleans())
    token = st.binary(min_size=1, max_size=3).map(bytes.hex) if as_bytes else SMALL
    ids, logprobs = [], []
    for _ in range(positions):
        width = k if even else draw(st.integers(0, 7))
        other = width if even or draw(st.booleans()) else draw(st.integers(0, 7))
        ids.append(tuple(draw(st.lists(token, min_size=width, max_size=width))))
        logprobs.append(tuple(draw(st.lists(LOGPROB, min_size=other, max_size=other))))
    tokens = tuple(draw(st.lists(token, min_size=positions, max_size=positions)))
    lists = (
        {"token_bytes": tokens, "top_bytes": tuple(ids)}
        if as_bytes
        else {"tokens": tokens, "top_ids": tuple(ids)}
    )
    return draw(
        st.builds(
            LogitEvent,
            v=st.just(1),
            **labels(),
            expected_arms=st.lists(st.sampled_from(ARMS), min_size=1, max_size=3).map(tuple),
            definition=st.sampled_from(["raw", "temperature", "processed"]),
            source=st.sampled_from(["generated", "forced"]),
            kind=st.sampled_from(["logprobs", "logits"]),
            precision=st.integers(1, 17) | st.sampled_from(["f16", "f32", "f64"]),
            ended=st.none() | st.booleans(),
            top_logprobs=st.just(tuple(logprobs)),
            **{name: st.just(value) for name, value in lists.items()},
        )
    )


node_events = st.builds(NodeEvent, v=st.just(1), node=NAME, ts_us=st.integers(0, 4_102_444_800_000_000))


def label_texts(column: LabelColumn) -> list[str | None]:
    return [column.get(i) for i in range(len(column.codes))]


def assert_equal_columns(left: Any, right: Any) -> None:
    """Same values, same types, in every column; dictionaries of labels may differ in order and surplus."""
    assert type(left) is type(right)
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            assert a.tobytes() == b.tobytes(), field.name
            assert a.shape == b.shape, field.name
        elif field.name == "labels":
            assert list(a) == list(b)
            assert {n: label_texts(c) for n, c in a.items()} == {n: label_texts(c) for n, c in b.items()}
        elif isinstance(a, LabelColumn):
            assert label_texts(a) == label_texts(b)
        elif field.name == "gauges":
            assert {n: c.tolist() for n, c in a.items()} == {n: c.tolist() for n, c in b.items()}
        else:
            assert a == b, field.name
