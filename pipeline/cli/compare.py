"""`klaxon compare`: two captures of answers, their divergence and a verdict. Needs no Kafka."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.cli.captured import load_capture
from pipeline.cli.exits import Exit
from pipeline.cli.options import config_option, json_option
from pipeline.cli.printing import printed
from pipeline.config import Config
from pipeline.core.captures.comparison import (
    CONFIDENCE,
    NOTE,
    Comparison,
    Mode,
    compare_captures,
    what_is_missing,
)

_EXITS: Final = {"pass": Exit.OK, "trip": Exit.BAD, "not_enough_data": Exit.NOT_ENOUGH_DATA}
_STYLES: Final = {"pass": "bold green", "trip": "bold red", "not_enough_data": "bold yellow"}
_REASONS: Final = {
    "no_logprobs": "no log-probabilities in the answer (ask for logprobs and top_logprobs)",
    "no_token_identity": "neither token ids nor bytes (display text does not tell tokens apart)",
    "engine_error": "the engine answered with an error",
    "logprobs_incomplete": "log-probabilities missing from the middle of the answer",
    "other_choices": "further choices of the same prompt (the first is compared)",
    "identity_mismatch": "ids on one side, bytes on the other",
    "forced_mismatch": "the scored tokens are not those of the baseline",
    "definition_mismatch": "the sides state different log-probability definitions",
    "no_position": "no position can be read on both sides",
    "only_in_baseline": "no such answer in CANARY",
    "only_in_canary": "no such answer in BASELINE",
}
_MEANINGS: Final = {
    "kl_lower": "least KL(baseline‖canary) that fits both lists, nats: judged",
    "kl_floor": "the same tokens with a 1e-9 floor, nats: not judged",
    "js_lower": "least Jensen–Shannon divergence, at most 0.693 nats",
    "tv_lower": "least total variation, at most 1",
    "cosine": "cosine of the listed probabilities",
    "top1_agree": "share of positions with the same likeliest token",
    "behaviour_offset": "sqrt(js_lower / log 2), from 0 to 1",
    "entropy_lower_p": "BASELINE's entropy over its lists and one rest, nats",
    "entropy_lower_q": "CANARY's, likewise",
    "delta_p": "what CANARY gives BASELINE's token beyond what BASELINE does",
    "over_limit": "share of positions whose kl_lower is over the limit",
}


def _finite(_: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise click.BadParameter("not a finite number of nats, 0 or more", param=parameter)
    return value


@click.command(
    epilog="Example: klaxon compare baseline.jsonl canary.jsonl --per-pair",
    short_help="Compare two captures of answers.",
)
@click.argument("baseline", type=click.Path(exists=True, path_type=Path))
@click.argument("canary", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--limit",
    type=float,
    default=0.05,
    show_default=True,
    callback=_finite,
    help="Mean kl_lower, in nats per position, that the canary may reach.",
)
@click.option("--per-pair", is_flag=True, help="Also a table with one line per pair.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "free", "forced"]),
    default="auto",
    show_default=True,
    help="free: up to the first different token; forced: the canary scored the baseline's tokens, "
    "every position counts; auto: forced where a record says `source: forced`.",
)
@json_option
@config_option
def compare(
    baseline: Path,
    canary: Path,
    limit: float,
    per_pair: bool,
    mode: str,
    as_json: bool,
    config: Config,  # noqa: ARG001 (every command takes --config; nothing of it is needed here)
) -> int:
    """Compare CANARY's answers with BASELINE's, token by token.

    Each side is a JSONL file of OpenAI-style responses with log-probabilities (bare with a `prompt_id`, or
    {"prompt_id": …, "response": …}), or a folder of captured bodies NAME.sse and NAME.json. Answers are
    paired by prompt_id, else by file name, else by order.

    Exit code: 0 pass, 1 trip, 2 bad input, 4 not enough data.
    """
    comparison = compare_captures(load_capture(baseline), load_capture(canary), limit, cast("Mode", mode))
    if as_json:
        click.echo(json.dumps(comparison.result, allow_nan=False, ensure_ascii=False))
    else:
        printed(lambda console: _print(console, comparison, per_pair))
    if comparison.verdict == "not_enough_data":
        click.echo(f"klaxon: not enough data: {what_is_missing(comparison)}", err=True)
    return int(_EXITS[comparison.verdict])


def _print(console: Console, comparison: Comparison, per_pair: bool) -> None:
    result = comparison.result
    if per_pair:
        console.print(_pair_table(result["per_pair"]))
    if result["pairs"]:
        table = Table("measure", "mean", "meaning", box=None, pad_edge=False)
        for name, value in result["mean"].items():
            if value is not None:
                table.add_row(name, _number(value), _MEANINGS[name])
        if result["perplexity_ratio"] is not None:
            table.add_row(
                "perplexity_ratio",
                _number(result["perplexity_ratio"]),
                "CANARY's over BASELINE's, of emitted tokens on both lists",
            )
        console.print(table)
    for reason, count in result["skipped"].items():
        console.print(f"skipped {count} · {reason}: {_REASONS[reason]}")
    console.print(_verdict(result))
    console.print(f"A {NOTE}.", style="dim")


def _verdict(result: Mapping[str, Any]) -> Text:
    text = Text.assemble((result["verdict"].replace("_", " "), _STYLES[result["verdict"]]))
    text.append(f" · {result['pairs']} pairs, {result['positions']} positions · limit {result['limit']:g}")
    if result["interval"] is not None:
        low, high = result["interval"]
        text.append(f" · kl_lower {_number(result['mean']['kl_lower'])}")
        text.append(f" ({CONFIDENCE:.0%} interval {_number(low)} to {_number(high)})")
    return text


def _pair_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("prompt_id", no_wrap=True)
    for name in ("positions", "differs at", "kl_lower", "p95", "largest", "over", "kl_floor", "top-1"):
        table.add_column(name, justify="right")
    for row in rows:
        first = row["first_difference"]
        table.add_row(
            Text(row["prompt_id"]),
            str(row["positions"]),
            "–" if first is None else str(first),
            *(_number(row[name]) for name in ("kl_lower", "kl_lower_p95", "kl_lower_max")),
            f"{row['over_limit']:.0%}",
            _number(row["kl_floor"]),
            f"{row['top1_agree']:.0%}",
        )
    return table


def _number(value: float) -> str:
    return f"{value:.4g}"
