"""Hostile bytes into every reader, in short; the long form is `python -m tests.faults.fuzz`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import columnar_codec, json_codec
from schemas.columns import Rejected
from schemas.wire_columns import read_number
from tests.faults import readers as readers_module
from tests.faults.fuzz import fuzz, inputs
from tests.faults.readers import check_rejected, readers

pytestmark = pytest.mark.faults

SEED = 7
INPUTS = 4_500
READERS = readers()


def test_every_reader_survives_mutated_records() -> None:
    result = fuzz(SEED, 0, INPUTS)
    assert not result.findings, f"seed {SEED}: {result.findings[0]}"
    for name, tally in result.tallies.items():
        # Not a proof of anything if nothing came through, or everything did.
        assert tally.accepted > 10, name
        assert tally.rejected > 10, name


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(value=st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: b"\x9b\x01\xa8requests" + tail))
def test_every_reader_survives_any_bytes(value: bytes) -> None:
    for reader in READERS.values():
        reader.read(value)


def test_an_input_follows_from_its_seed_and_number() -> None:
    one = {number: value for number, _, value in inputs(SEED, 0, 60, READERS)}
    two = {number: value for number, _, value in inputs(SEED, 30, 30, READERS)}
    assert {number: one[number] for number in two} == two


def _within_no_limits(column: Any, blob: bytes, n: int) -> Any:
    return read_number(column, blob, n)[0], ()


def _as_they_are(ids: Any, logprobs: Any, *_: Any) -> Any:
    return ids, logprobs


@pytest.mark.parametrize(
    ("module", "name", "without", "found_in"),
    [
        (columnar_codec, "read_number", _within_no_limits, "klaxon.requests columns"),
        (columnar_codec, "blank_infinite", _as_they_are, "klaxon.logits columns"),
        (columnar_codec, "_read_extras", lambda extras, *_: extras, "klaxon.requests columns"),
        (json_codec, "logit_shape_error", lambda _: None, "klaxon.logits json"),
        (readers_module, "unsound", lambda *_: "", "gate finals"),
    ],
)
def test_a_reader_without_one_of_its_checks_is_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, without: Callable[..., Any], found_in: str
) -> None:
    monkeypatch.setattr(module, name, without)
    result = fuzz(SEED, 0, INPUTS, until_found=True, only=found_in)
    assert result.findings, f"{result.inputs} inputs without {name} found nothing"
    print(f"{name}: found by input {result.findings[0].number} of {found_in}")


def test_a_reason_that_is_no_text_is_found() -> None:
    with pytest.raises(UnicodeEncodeError):
        check_rejected(Rejected(0, "x", "\ud800"))
