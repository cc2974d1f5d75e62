"""`klaxon sample-size`: how many pairs a verdict needs (D4), and how long that takes."""

from __future__ import annotations

import math
from typing import Final

import click
import msgspec
from msgspec import Struct

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import json_option
from pipeline.core.gate.answer import span
from pipeline.core.statistics.sample_size import (
    PASS_CAP,
    Plan,
    SampleSizeError,
    fewest_pairs_to_pass,
    pairs_needed,
)

OPTIONS: Final = {name: f"--{name.replace('_', '-')}" for name in (*Plan.__dataclass_fields__, "limit")}


class SampleSize(Struct, frozen=True, kw_only=True):
    """The answer. `pairs`: of a test of fixed size, per arm where `unpaired`."""

    pairs: int
    fewest_pairs_to_pass: int
    """About what the gate's own test for a pass takes at this limit, however good the canary is."""
    min_pairs: int
    """The greater of both: what a weight step should have."""
    seconds: int | None
    """Until `min_pairs` at the rate; null without one."""
    alpha: float
    power: float
    variance_ratio: float
    cv: float
    lift: float
    one_sided: bool
    unpaired: bool
    limit: float
    rate: float | None


@click.command("sample-size")
@click.option("--alpha", type=float, default=0.05, show_default=True, help="Chance of a false alarm.")
@click.option(
    "--power", type=float, default=0.8, show_default=True, help="Chance to see a change that is there."
)
@click.option(
    "--variance-ratio",
    type=float,
    default=1.8,
    show_default=True,
    help="How much non-determinism enlarges the variance of a pair's score.",
)
@click.option(
    "--cv",
    type=float,
    default=1.0,
    show_default=True,
    help="Standard deviation of a pair's score over its mean, without non-determinism.",
)
@click.option(
    "--lift",
    type=float,
    default=0.1,
    show_default=True,
    help="Relative change of the mean to be seen: 0.1 is 10 %.",
)
@click.option("--one-sided", is_flag=True, help="Only a rise counts.")
@click.option("--unpaired", is_flag=True, help="The arms answer different requests; n is of each.")
@click.option(
    "--limit",
    type=float,
    default=0.05,
    show_default=True,
    help="The rule's limit in nats: what a pass takes depends on it.",
)
@click.option(
    "--rate", type=float, metavar="PAIRS", help="Scored pairs a second: also say how long it takes."
)
@json_option
def sample_size(
    alpha: float,
    power: float,
    variance_ratio: float,
    cv: float,
    lift: float,
    one_sided: bool,
    unpaired: bool,
    limit: float,
    rate: float | None,
    as_json: bool,
) -> int:
    """How many pairs does a verdict need, and how long do they take?

    It plans a test of fixed size: ceil((z(1 − alpha/2) + z(power))² · variance ratio · (cv / lift)²) pairs,
    z(1 − alpha) with --one-sided; with --unpaired the ratio counts one more. A weight step's min_pairs is the
    greater of that and of what the gate's test for a pass takes whatever it sees.

    Example: klaxon sample-size --lift 0.5 --cv 0.84 --one-sided --rate 2
    """  # fmt: skip
    if rate is not None and not 0 < rate < math.inf:
        raise CommandError(f"--rate {rate:g}: a finite number above 0 is expected", Exit.USAGE)
    try:
        plan = Plan(alpha, power, variance_ratio, cv, lift, one_sided, unpaired)
        pairs, fewest = pairs_needed(plan), fewest_pairs_to_pass(limit, alpha)
    except SampleSizeError as error:
        raise CommandError(f"{OPTIONS[error.field]} {error}", Exit.USAGE) from None
    least = max(pairs, fewest)
    answer = SampleSize(
        pairs=pairs,
        fewest_pairs_to_pass=fewest,
        min_pairs=least,
        seconds=None if rate is None else math.ceil(least / rate),
        alpha=alpha,
        power=power,
        variance_ratio=variance_ratio,
        cv=cv,
        lift=lift,
        one_sided=one_sided,
        unpaired=unpaired,
        limit=limit,
        rate=rate,
    )
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
    else:
        for line in lines(answer):
            click.echo(line)
    return Exit.OK


def lines(answer: SampleSize) -> list[str]:
    """The answer for a person."""
    of = "pairs of each arm" if answer.unpaired else "pairs"
    change = "a rise" if answer.one_sided else "a change"
    told = [
        f"{answer.pairs:,} {of} show {change} of {100 * answer.lift:g} % with a chance of {answer.power:g},"
        f" and one that is not there with {answer.alpha:g} (a test of fixed size)",
        f"about {answer.fewest_pairs_to_pass:,} pairs take the gate to a pass at limit {answer.limit:g},"
        f" however good they are: it bets on scores cut at {PASS_CAP:g} nats, anew at each weight step",
        f"progression.min_pairs: {answer.min_pairs}",
    ]
    if answer.seconds is not None:
        told.append(f"{span(answer.seconds)} at {answer.rate:g} pairs/s, at each weight step")
    return told
