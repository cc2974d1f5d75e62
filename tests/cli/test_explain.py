"""`klaxon explain`: from the topics alone, whatever else stands in them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import click
import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.explain import _time_us
from pipeline.cli.main import cli
from pipeline.core.gate.settings import Effect
from pipeline.core.gate.state import encode_state
from pipeline.workers import topics
from schemas.control import Directive
from schemas.signing import Signer, Use
from schemas.topics import Topic, gating_partition
from tests.core.gate.build import T0, Bench, command, decisions, healthy_pairs, us
from tests.core.gate.test_explanation import OLDEST
from tests.core.gate.test_explanation_log import a_life
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.records import Written, produce

SEAT = gating_partition("chat")
Asked: TypeAlias = Callable[..., Any]


def written(topic: Topic, value: bytes, key: bytes = b"chat", signer: Signer | None = None) -> Written:
    headers = () if signer is None else (signer.header(topic, key, value),)
    return Written(topic, value, key=key, partition=SEAT, headers=headers)


def records(effects: Iterable[Effect]) -> list[Written]:
    """What a gate writes of these, in its order."""
    found = []
    for effect in effects:
        if effect.rollout is not None:
            found.append(written(Topic.ROLLOUTS, msgspec.json.encode(effect.rollout)))
        found += [written(Topic.STATE, encode_state(one), one.key.encode()) for one in effect.states]
        if effect.decision is not None:
            found.append(written(Topic.DECISIONS, msgspec.json.encode(effect.decision)))
        if effect.directive is not None:
            found.append(directive(effect.directive))
    return found


def directive(one: Directive, signer: Signer | None = None) -> Written:
    return written(Topic.CONTROL, msgspec.json.encode(one), signer=signer or keys.signer(Use.DIRECTIVES))


@pytest.fixture
async def broker(embedded: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    await topics.create(embedded.config)
    for name, value in embedded.environment.items():
        monkeypatch.setenv(name, value)
    return embedded


async def asked(*arguments: str) -> Any:
    """What the command prints as JSON."""
    done = await asyncio.to_thread(
        CliRunner().invoke, cli, ["explain", *arguments, "--json"], standalone_mode=False
    )
    assert (done.exception, done.return_value) == (None, Exit.OK), done.output
    return json.loads(done.stdout)


async def refused(*arguments: str) -> tuple[Exit, str]:
    """Why it does not answer; its standard output is empty then."""
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["explain", *arguments], standalone_mode=False)
    assert isinstance(done.exception, CommandError), done.output
    assert done.stdout == ""
    return done.exception.exit_code, str(done.exception)


@pytest.mark.slow
async def test_a_life_told_from_the_log(broker: Broker) -> None:
    code, why = await refused("chat")
    assert (code, "holds nothing about 'chat'; start one with" in why) == (Exit.NOT_ENOUGH_DATA, True), why
    bench = a_life()
    garbage = [b"", b"junk", b"{}", b'{"v": 2}', OLDEST.replace(b'"chat"', b'"other"') % (b"trip", b"")]
    await produce(
        broker,
        [
            *(written(Topic.DECISIONS, one) for one in garbage),
            written(Topic.DECISIONS, OLDEST % (b"step", b""), b"other"),
            *(written(Topic.ROLLOUTS, one) for one in (b"", b"junk")),
            *records(bench.effects),
            written(Topic.DECISIONS, b"[" * 10_000),
            written(Topic.CONTROL, b"junk"),
            directive(bench.control["chat"]),
        ],
    )
    told = await asked("chat")
    assert told["decision"] == json.loads(msgspec.json.encode(decisions(bench.effects)[-1]))
    assert told["text"].startswith(
        "An operator's `retire` was obeyed in generation 2 at 2023-11-14 22:14:50 UTC"
    )
    assert "What it stands on: The canary `v2` was taken out of rotation (weight 1 % to 0)" in told["text"]
    assert told["stands_on"]["decision"]["reason"] == "abort: aborted by an operator"
    assert told["waits_for"] is None
    assert "history" not in told
    assert told["notes"] == [
        "1 decision of another version left out: the release that wrote them can read them.",
        "5 records under this name left out: no gate of this release wrote them.",
    ]
    told = await asked(
        "chat", "--generation", "1", "--epoch", "2", "--at", "2023-11-14T22:14:00Z", "--history"
    )
    (reason,) = told["reasons"]
    assert (reason["rule"], reason["capability"], reason["limit"]) == ("G3-divergence", "G3", 0.05)
    assert reason["located"]["value"] == "gpu-3|>2048"
    assert re.search(
        r"because rule G3-divergence \(G3\) was over its limit: mean kl_lower 0\.\d+ nats", told["text"]
    )
    assert len(told["history"]) == sum(len(one.evaluations) for one in decisions(bench.effects))
    for arguments, words in (
        (
            ("--generation", "7"),
            "no decision about 'chat' of generation 7; the oldest that is kept",
        ),
        (
            ("--at", "1"),
            "up to 1970-01-01 00:00:00 UTC; the oldest that is kept fell at 2023",
        ),
    ):
        code, why = await refused("chat", *arguments)
        assert (code, words in why) == (Exit.NOT_ENOUGH_DATA, True), why
    code, why = await refused("caht")
    assert (code, "holds nothing about 'caht'; did you mean 'chat'?" in why) == (
        Exit.NOT_ENOUGH_DATA,
        True,
    ), why


@pytest.mark.slow
async def test_what_is_missing_is_told_with_its_time(broker: Broker) -> None:
    """From the gate's memory; and for a person, with the history below."""
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.command(command("step", "a"), us(T0 + 22))
    bench.write(bench.core.renew(us(T0 + 27)))
    await produce(broker, records(bench.effects))
    told = await asked("chat")
    assert "An operator's `step` was refused at 2023-11-14 22:13:42 UTC: no pass: G3" in told["text"]
    assert "What it stands on: An operator's `start` was obeyed in generation 1" in told["text"]
    codes = [one["code"] for one in told["waits_for"]]
    assert codes == [
        "lease_over", *["too_few_samples"] * 4, "settling", "too_few_pairs",
    ]  # fmt: skip
    assert "G3-divergence: 60 of 100 samples in 5 min, 40 missing; about 4 s at 10/s" in told["text"]
    assert "All in all: 1 % to 5 %, not by waiting alone." in told["text"]
    told = await asked("chat", "--at", str(us(T0 + 21)))
    assert told["waits_for"] is None
    done = await asyncio.to_thread(
        CliRunner().invoke, cli, ["explain", "chat", "--history"], standalone_mode=False
    )
    assert done.exception is None
    *paragraphs, table = done.stdout.rstrip().split("\n\n")
    assert (len(paragraphs), table) == (3, "No decision that is kept carries a verdict.")


@pytest.mark.slow
async def test_a_directive_that_contradicts_the_decisions_is_named(broker: Broker) -> None:
    """One that is signed counts; what a stranger wrote is not believed."""
    bench = Bench.started()
    await produce(broker, records(bench.effects))
    stands = bench.control["chat"]
    other = replace(stands, epoch=stands.epoch + 1, state="paused")
    renewed = replace(stands, epoch=stands.epoch + 1, ts_us=stands.ts_us + 5, lease_until_us=1)
    for one, signer, named in (
        (renewed, None, False),
        (other, keys.STRANGER, False),
        (other, None, True),
    ):
        await produce(broker, [directive(one, signer)])
        notes = (await asked("chat"))["notes"]
        assert any("routers obey the directive" in note for note in notes) == named


@pytest.mark.parametrize(
    ("text", "at_us"),
    [
        ("2026-12-01T12:03:04Z", 1_796_126_584_000_000),
        ("2026-12-01 12:03:04", 1_796_126_584_000_000),
        ("2026-12-01T13:03:04.5+01:00", 1_796_126_584_500_000),
        ("1796126584000000", 1_796_126_584_000_000),
        ("2026-12-01", 1_796_083_200_000_000),
        ("1960-01-01", 0),
    ],
)
def test_times(text: str, at_us: int) -> None:
    assert _time_us(*_place(), text) == at_us


@pytest.mark.parametrize("text", ["", "noon", "12:03", "nan", "-1", "99999999999999999999", "2026-13-01"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write it like 2026-11-30T12:03:04Z"):
        _time_us(*_place(), text)


def _place() -> tuple[click.Context, click.Parameter]:
    parameter = click.Option(["--at"])
    return click.Context(click.Command("explain")), parameter


@pytest.mark.parametrize("name", ["", "x" * 257, "\udcff"])
def test_what_is_no_name(name: str) -> None:
    """No broker is asked: there is none."""
    done = CliRunner().invoke(cli, ["explain", name], standalone_mode=False)
    assert isinstance(done.exception, CommandError)
    assert done.exception.exit_code is Exit.USAGE
    assert "is no roll-out's name" in str(done.exception)


@pytest.mark.parametrize(
    "arguments", [[], ["chat", "--at", "noon"], ["chat", "--epoch", "-1"], ["chat", "b"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, ["explain", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
