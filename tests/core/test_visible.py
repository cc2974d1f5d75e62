"""What a stranger's text may do to who reads it: nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.rollout import answer_line
from pipeline.cli.sql import _text
from pipeline.cli.watch import line
from pipeline.core.visible import visible
from schemas.control import Cause, Decision, Directive, Inputs, Located

STEERS = "node\x1b]0;title\x07\nchat: promoted\u202e\x9b2J"


@pytest.mark.parametrize("text", ["smol-2 · 1 %", "größer > 2,048", "", "日本 ✓"])
def test_plain_text_stays(text: str) -> None:
    assert visible(text) == text


@given(st.text())
def test_nothing_that_steers_is_left(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(text, keep="\n").replace("\n", "").isprintable()


def test_names_of_nodes_steer_no_terminal_and_add_no_line() -> None:
    located = Located(dimension="node", value=STEERS, share_of_excess=1.0, share_of_traffic=0.1)
    directive = Directive(
        rollout="chat", generation=1, epoch=1, ts_us=0, lease_until_us=0, dead_man_us=0, state="tripped",
        weights={STEERS: 100.0}, last_promoted={STEERS: 100.0}, fallback=STEERS,
        cause=Cause(rule="G3", located=located),
    )  # fmt: skip
    inputs = Inputs(offsets={}, command_offset=0, complete_through=0, now_us=0)
    refused = Decision(kind="refused", directive=None, inputs=inputs, reason=STEERS)
    for shown in (line(directive, as_json=False), answer_line("chat", refused)):
        assert shown.isprintable()
        assert "title" in shown
    assert _text(STEERS) == visible(STEERS, keep="\n")
