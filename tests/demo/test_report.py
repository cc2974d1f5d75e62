"""The demo's verdict on itself: every way in which a run is not what it had to show is named."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pipeline.cli.demo.observe import RouterLine, RouterView, in_cell
from pipeline.cli.demo.play import Sent
from pipeline.cli.demo.report import (
    FAULTY_CELL,
    Archived,
    Result,
    RouterSeen,
    problems_of,
    show,
)
from pipeline.cli.demo.story import Story
from schemas.control import Cause, Directive, Located

PLACE = Located(dimension="node_context", value=FAULTY_CELL, share_of_excess=1.0, share_of_traffic=0.05)


def directive(canary: float, state: str = "observing", located: Located | None = None) -> Directive:
    cause = Cause(
        rule="G3-divergence", capability="G3", metric="kl_lower mean", value=0.081, limit=0.05, samples=130
    )
    return Directive(
        rollout="demo",
        generation=1,
        epoch=1,
        ts_us=0,
        lease_until_us=0,
        dead_man_us=0,
        state=state,  # type: ignore[arg-type]
        weights={"smol-1": 100 - canary, "smol-2": canary},
        last_promoted={"smol-1": 100.0},
        fallback="smol-1",
        cause=msgspec.structs.replace(cause, located=located) if state == "tripped" else None,
    )


def problems(**changes: Any) -> tuple[str, ...]:
    good: dict[str, Any] = {
        "fault": "long_context",
        "tripped": directive(0.0, "tripped", PLACE),
        "router": RouterSeen(0.0, (1.0, 0.0)),
        "archive": Archived(250, 150, 3),
        "events": 250,
        "scored": 150,
    }
    return problems_of(**(good | changes))


def test_a_located_trip_with_a_whole_archive_is_what_had_to_be_shown() -> None:
    assert problems() == ()


def test_a_step_without_a_trip_is_what_had_to_be_shown_without_a_fault() -> None:
    assert problems(fault="none", tripped=None, router=RouterSeen(5.0, (1.0, 5.0))) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tripped": None}, "no trip"),
        ({"tripped": directive(0.0, "tripped")}, "names no place"),
        (
            {"tripped": directive(0.0, "tripped", msgspec.structs.replace(PLACE, value="canary-1|>2048"))},
            "located at node_context canary-1|>2048",
        ),
        (
            {"tripped": directive(0.0, "tripped", msgspec.structs.replace(PLACE, dimension="node"))},
            "located at node ",
        ),
        ({"router": RouterSeen(1.0, (1.0,))}, "still gives smol-2 1 %"),
        ({"archive": Archived(249, 150, 3)}, "holds 249 request events, 250 were published"),
        ({"archive": Archived(250, 151, 3)}, "holds 151 scored pairs, 150 were published"),
        (
            {"fault": "none"},
            "tripped without a fault: G3-divergence kl_lower mean 0.0810 over its limit 0.05",
        ),
        ({"fault": "none", "tripped": None, "router": RouterSeen(1.0, (1.0,))}, "no promotion step"),
        ({"fault": "none", "tripped": None, "router": RouterSeen(0.0, ())}, "no promotion step"),
    ],
)
def test_what_is_not_as_expected_is_named(changes: dict[str, Any], message: str) -> None:
    found = problems(**changes)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("dimension", "value", "inside"),
    [
        ("node_context", "canary-3|>2048", True),
        ("node_context", "canary-3|>4096", False),
        ("node_context", "canary-1|>2048", False),
        ("node", "canary-3", True),
        ("node", "canary-2", False),
        ("context", ">2048", True),
        ("context", ">4096", False),
        ("request_type", "chat", True),
    ],
)
def test_pairs_of_the_located_cell(dimension: str, value: str, inside: bool) -> None:
    sent = Sent(1, "canary", "canary-3", 2049, affected=True)
    place = Located(dimension=dimension, value=value, share_of_excess=1.0, share_of_traffic=0.1)
    assert in_cell(sent, place) == inside
    assert in_cell(sent, None)


def line(epoch: int, canary: float, state: str = "observing") -> bytes:
    return (
        msgspec.json.encode(
            {
                "rollout": "demo",
                "generation": 1,
                "epoch": epoch,
                "reason": "applied",
                "changed_us": epoch,
                "effective": {"weights": {"smol-1": 100 - canary, "smol-2": canary}},
                "directive": directive(canary, state),
            }
        )
        + b"\n"
    )


async def test_the_router_view_knows_steps_and_the_trip() -> None:
    view = RouterView()
    output = asyncio.StreamReader()
    output.feed_data(line(1, 1.0) + line(2, 1.0) + line(3, 5.0))
    output.feed_eof()
    await view.follow(output)
    assert (view.steps, view.promoted_a_step, view.trip) == ([1.0, 5.0], True, None)
    output = asyncio.StreamReader()
    output.feed_data(line(4, 0.0, "tripped"))
    output.feed_eof()
    await view.follow(output)
    assert view.trip is view.latest is not None
    assert view.steps == [1.0, 5.0, 0.0]
    assert await view.more(0.01) is False


def test_falling_from_the_first_weight_is_no_promotion() -> None:
    view = RouterView()
    for epoch, weight in enumerate((0.0, 1.0, 0.0)):
        view.lines.append(msgspec.json.decode(line(epoch, weight), type=RouterLine))
    assert not view.promoted_a_step


def test_the_report_says_what_happened_where_and_how_fast() -> None:
    tripped = directive(0.0, "tripped", PLACE)
    result = Result(
        outcome="tripped",
        expected="tripped",
        as_expected=True,
        problems=(),
        fault="long_context",
        seed=1,
        requests=100,
        events=250,
        pairs=100,
        control_pairs=50,
        affected_pairs=40,
        directive=tripped,
        located=PLACE,
        decision_latency_us=123_456,
        router=RouterSeen(0.0, (1.0, 0.0)),
        archive=Archived(250, 150, 3, ("command", "step", "trip")),
        table=(
            {
                "node": "canary-3",
                "context": "2049-4096",
                "prompt": "long-a",
                "pairs": 9,
                "mean_kl": 0.2,
                "worst_position": 1.5,
            },
        ),
        elapsed_us=61_000_000,
    )
    text = shown(result, 200)
    for said in (
        "TRIPPED  G3-divergence kl_lower mean 0.0810 over its limit 0.05 on 130 pairs",
        "node_context canary-3|>2048: 100% of the excess divergence on 5% of the traffic",
        "1 % → 0 %",
        "archive  250 request events (100 of users, 150 mirrored copies), "
        "150 pairs (100 of the canary, 50 of the control), 3 decisions (start, step, trip)\n",
        "100 user requests, 100 canary pairs, 40 of them damaged by the fault, 61 s: as expected",
        "123 ms from publish()",
        "long-a",
        "as expected",
    ):
        assert said in text
    # A narrow terminal wraps between words.
    assert words(shown(result, 60)) == words(text)


def shown(result: Result, width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        show(result, console)
    return capture.get()


def words(text: str) -> list[str]:
    """All but those of the table."""
    return [word for line in text.splitlines() if not set("│┃━") & set(line) for word in line.split()]


async def test_lines_of_other_roll_outs_are_not_the_demos() -> None:
    view = RouterView()
    output = asyncio.StreamReader()
    other = line(9, 0.0, "tripped").replace(b'"rollout":"demo"', b'"rollout":"other"')
    output.feed_data(line(1, 1.0) + other)
    output.feed_eof()
    await view.follow(output)
    assert (view.steps, view.trip, len(view.lines)) == ([1.0], None, 1)


def test_the_story_goes_whole_to_a_file_and_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "a line of the story about smol-2 [which] is wider than forty columns"
    for as_json in (False, True):
        story = Story(as_json=as_json)
        with story.progress(10) as progress:
            progress(3, "canary 1 %")
            story.say(long)
        out, err = capsys.readouterr()
        assert (out, err) == (("", f"{long}\n") if as_json else (f"{long}\n", ""))
