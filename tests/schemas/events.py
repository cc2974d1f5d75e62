"""Hypothesis strategies of events, and equality of columns."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from schemas.columns import DEFINITIONS, KINDS, LOGIT_LABELS, SOURCES, LabelColumn
from schemas.events import ARMS, LogitEvent, NodeEvent, RequestEvent

SMALL = st.integers(0, 2**31 - 1)
TEXT = st.text(max_size=12)
NAME = st.text(min_size=1, max_size=12)
HEX32 = st.integers(0, 2**128 - 1).map(lambda x: f"{x:032x}")
DURATION = st.integers(0, 86_400_000_000)
OPTIONAL_TEXT = st.none() | TEXT
REQUIRED_LABELS = {"rollout": NAME, "node": NAME, "model_version": NAME}


def labels() -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys(LOGIT_LABELS, OPTIONAL_TEXT)
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

SPECIAL_LOGPROBS = (None, -9999.0, 0.0, 0.5, 1e300, -1e300)


def _logprob(rng: random.Random) -> float | None:
    if rng.random() < 0.1:
        return rng.choice(SPECIAL_LOGPROBS)
    value = rng.uniform(-30, 0) if rng.random() < 0.3 else rng.uniform(-12, -2)
    return round(value, 4) if rng.random() < 0.5 else value


def random_logit_event(rng: random.Random) -> LogitEvent:
    """A logit event with its edges: uneven lists, nulls, duplicates, ids or bytes, any label absent."""
    positions = rng.randint(1, 4)
    even = rng.random() < 0.5
    k = rng.randint(1, 7)
    as_bytes = rng.random() < 0.3

    def token() -> Any:
        return (
            rng.randbytes(rng.randint(1, 3)).hex() if as_bytes else rng.choice((rng.randint(0, 9), 2**31 - 1))
        )

    widths = [k if even else rng.randint(0, 7) for _ in range(positions)]
    others = [w if even or rng.random() < 0.7 else rng.randint(0, 7) for w in widths]
    names = ("token_bytes", "top_bytes") if as_bytes else ("tokens", "top_ids")
    optional = {name: f"{name}-{rng.randint(0, 2)}" for name in LOGIT_LABELS if rng.random() < 0.5}
    labels = {**optional, "rollout": "r", "node": f"n{rng.randint(0, 3)}", "model_version": "m"}
    lists: dict[str, Any] = {
        names[0]: tuple(token() for _ in range(positions)),
        names[1]: tuple(tuple(token() for _ in range(width)) for width in widths),
        "top_logprobs": tuple(tuple(_logprob(rng) for _ in range(width)) for width in others),
    }
    return LogitEvent(
        v=1,
        **labels,
        **lists,
        arm=rng.choice(ARMS),
        signature=f"{rng.getrandbits(128):032x}",
        pair_id=rng.choice((None, "p", f"{rng.getrandbits(128):032x}")),
        generation=rng.choice((None, 0, 2**31 - 1)),
        ts_us=rng.randint(0, 4_102_444_800_000_000),
        duration_us=rng.randint(0, 86_400_000_000),
        input_tokens=rng.randint(0, 2**31 - 1),
        temperature=rng.choice((None, 0.0, 0.7, 100.0)),
        seed=rng.choice((None, -(2**63), 2**63 - 1)),
        expected_arms=tuple(rng.choices(ARMS, k=rng.randint(1, 3))),
        definition=rng.choice(DEFINITIONS),
        source=rng.choice(SOURCES),
        kind=rng.choice(KINDS),
        precision=rng.choice((1, 3, 4, 5, 6, 17, "f16", "f32", "f64")),
        ended=rng.choice((None, False, True)),
    )


def logit_events() -> st.SearchStrategy[LogitEvent]:
    # One drawn seed per event: drawing every number one by one is too slow for lists of lists.
    return st.integers(0, 2**32 - 1).map(lambda seed: random_logit_event(random.Random(seed)))


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
