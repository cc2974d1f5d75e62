"""`klaxon sample-size`: the reference's figures, how long they take, and options that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.main import cli


def asked(*arguments: str) -> Any:
    done = CliRunner().invoke(cli, ["sample-size", *arguments, "--json"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, Exit.OK), done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "pairs", "min_pairs"),
    [
        ((), 1413, 1413),
        (("--variance-ratio", "1"), 785, 785),
        (("--one-sided", "--cv", "0.84", "--lift", "0.5"), 32, 290),
        (("--alpha", "0.01", "--power", "0.9", "--cv", "2.9", "--lift", "0.2"), 5632, 5632),
        (("--unpaired",), 2198, 2198),
        (("--lift", "1", "--limit", "0.1"), 15, 144),
    ],
)
def test_pairs(arguments: tuple[str, ...], pairs: int, min_pairs: int) -> None:
    told = asked(*arguments)
    assert (told["pairs"], told["min_pairs"], told["seconds"]) == (pairs, min_pairs, None)


@pytest.mark.parametrize(("rate", "seconds"), [("1", 1413), ("10", 142), ("1413", 1), ("0.5", 2826)])
def test_how_long_it_takes(rate: str, seconds: int) -> None:
    assert asked("--rate", rate)["seconds"] == seconds


def test_a_person_is_told_why_it_is_never_less_than_290() -> None:
    arguments = ["sample-size", "--one-sided", "--cv", "0.84", "--lift", "0.5", "--rate", "2"]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.stdout.splitlines() == [
        "32 pairs show a rise of 50 % with a chance of 0.8, and one that is not there with 0.05 (a test of"
        " fixed size)",
        "about 290 pairs take the gate to a pass at limit 0.05, however good they are: it bets on scores"
        " cut at 4 nats, anew at each weight step",
        "progression.min_pairs: 290",
        "2 min 25 s at 2 pairs/s, at each weight step",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--alpha", "0"), "--alpha 0: a chance between 0 and 1"),
        (("--alpha", "nan"), "--alpha nan: a chance between 0 and 1"),
        (("--alpha", "1.5"), "--alpha 1.5: "),
        (("--power", "1"), "--power 1: a chance between 0 and 1"),
        (("--power", "0.04"), "--power 0.04: at most alpha"),
        (("--variance-ratio", "-1"), "--variance-ratio -1: a finite number above 0"),
        (("--cv", "inf"), "--cv inf: a finite number above 0"),
        (("--lift", "0"), "--lift 0: a finite number above 0"),
        (("--lift", "1e-9"), "look for a greater lift"),
        (("--limit", "4"), "--limit 4: a divergence between 0 and 4 nats"),
        (("--rate", "0"), "--rate 0: a finite number above 0"),
        (("--rate", "nan"), "--rate nan: "),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(cli, ["sample-size", *arguments], standalone_mode=False)
    assert isinstance(done.exception, CommandError)
    assert done.exception.exit_code is Exit.USAGE
    assert words in str(done.exception)
    assert done.stdout == ""


def test_what_is_no_number_or_no_option() -> None:
    for arguments in (["--alpha", "much"], ["--lyft", "1"], ["7"]):
        assert CliRunner().invoke(cli, ["sample-size", *arguments]).exit_code == 2
