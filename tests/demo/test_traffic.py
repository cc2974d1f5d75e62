"""Arrivals: the measured figures come back out of what is drawn; trace files are read as they are."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import pytest

from pipeline.cli.demo.traffic import (
    Arrival,
    TraceError,
    azure_time_us,
    drawn_arrivals,
    quantiles,
    read_figures,
    read_trace,
    trace_arrivals,
)


def test_drawn_arrivals_have_the_measured_rates_and_lengths() -> None:
    drawn = list(islice(drawn_arrivals(read_figures(), seed=3), 60_000))
    assert all(a.at_us <= b.at_us for a, b in pairwise(drawn))
    share = {"completion": 0.375, "chat": 0.1396}  # over 2,048 tokens, counted in the trace
    gap_us = {"completion": 389_652, "chat": 180_827}
    for service, expected in share.items():
        rows = [row for row in drawn if row.request_type == service]
        long = sum(row.input_tokens > 2048 for row in rows) / len(rows)
        assert long == pytest.approx(expected, abs=0.02)
        assert rows[-1].at_us / len(rows) == pytest.approx(gap_us[service], rel=0.25)


def test_the_same_seed_gives_the_same_arrivals_and_another_does_not() -> None:
    first, again, other = (list(islice(drawn_arrivals(read_figures(), s), 200)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_quantiles_are_sample_values_with_the_extremes() -> None:
    table = quantiles(range(1000))
    assert (table[0], table[50], table[-1]) == (0, 500, 999)


@pytest.mark.parametrize(
    ("text", "fraction_us"),
    [
        ("2023-11-16 18:17:03.9799609", 979_960),
        ("2023-11-16 18:17:03", 0),
        ("2023-11-16 18:17:03.5", 500_000),
    ],
)
def test_azure_times_keep_six_digits(text: str, fraction_us: int) -> None:
    assert azure_time_us(text) == 1_700_158_623_000_000 + fraction_us


def test_azure_csv_with_crlf_and_no_last_newline(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
        b"2023-11-16 18:17:04.0319600,3180,8"
    )
    rows = list(islice(trace_arrivals(trace), 4))
    assert rows[:2] == [Arrival(0, "chat", 4808), Arrival(52_000, "chat", 3180)]
    assert [row.input_tokens for row in rows[2:]] == [4808, 3180]
    assert rows[2].at_us == 104_000


def test_mooncake_rows(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n\n'
        '{"timestamp": 30, "input_length": 12, "output_length": 3, "hash_ids": [2]}\n'
    )
    assert read_trace(trace) == [Arrival(27_000, "chat", 6758), Arrival(30_000, "chat", 12)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n", r":1: expected the columns TIMESTAMP,ContextTokens"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", r":2: TIMESTAMP: 'noon' is no time"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.1x,1,2\n", r":2: TIMESTAMP"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-4,2\n", r":2: ContextTokens"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4\n", r":2: 2 fields"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", r"holds no request"),
        (b'{"timestamp": 1, "input_length": 2}\n{"timestamp": "x"}\n', r":2: .*timestamp"),
        (b'{"timestamp": 1}\n', r":1: .*input_length"),
        (b"\xff\xfe", r"not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        trace_arrivals(trace)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere.csv: cannot be read: No such file.*--trace"):
        trace_arrivals(tmp_path / "nowhere.csv")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "count", "lowest", "highest"),
    [
        ("azure_llm_2023_code.csv", 8_819, 3, 7_437),
        ("azure_llm_2023_conv.csv", 19_366, 2, 14_050),
        ("mooncake_fast25_conversation.jsonl", 12_031, 891, 126_195),
        ("mooncake_fast25_synthetic.jsonl", 3_993, 13, 191_378),
    ],
)
def test_the_public_traces_are_read_whole(
    shared_dir: Path, name: str, count: int, lowest: int, highest: int
) -> None:
    rows = read_trace(shared_dir / "data" / "traces" / name)
    tokens = [row.input_tokens for row in rows]
    assert (len(rows), min(tokens), max(tokens)) == (count, lowest, highest)
