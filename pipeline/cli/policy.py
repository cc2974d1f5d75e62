"""`klaxon policy check FILE`: read a policy as the gate would, and say what it will do."""

from __future__ import annotations

import click
import msgspec

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config
from pipeline.core.gate.policy import Policy, Rule
from pipeline.policy_file import PolicyError, parse_policy, read_policy_file, shipped_policy_text


@click.group()
def policy() -> None:
    """Policies: what trips, what pauses, what a weight step needs.

    Example: klaxon policy check policy.yaml
    """


@policy.command()
@click.argument("file", type=click.Path(dir_okay=False), required=False)
@config_option
@json_option
def check(file: str | None, config: Config, as_json: bool) -> int:
    """Check FILE, or without it the configured policy (the shipped one, unless policy.file names another).

    A mistake is named with its line: exit code 2.

    Example: klaxon policy check policy.yaml
    """
    file = file or config.policy.file
    try:
        read = (
            parse_policy(shipped_policy_text(), "the shipped policy")
            if file is None
            else read_policy_file(file)
        )
    except PolicyError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    if as_json:
        click.echo(msgspec.json.encode(summary(read)).decode())
        return Exit.OK
    for rule in read.rules:
        click.echo(rule_line(rule))
    coverage, progression = read.coverage, read.progression
    click.echo(
        f"coverage  below {float(coverage.limit):g} over {coverage.window_s} s:"
        f" {'no weight step' if coverage.action == 'hold' else 'pause'}"
    )
    click.echo(
        f"steps     {progression.mode}, at least {progression.min_pairs} pairs and"
        f" {read.window_s} s (longest window) + join timeout each"
    )
    click.echo(f"sha256    {read.hash}")
    return Exit.OK


def rule_line(rule: Rule) -> str:
    """One rule for a person."""
    limit = f"{float(rule.limit) / 1000:g} ms" if _is_latency(rule) else f"{float(rule.limit):g}"
    held = f" for {rule.hold_steps} s" if rule.hold_steps > 1 else ""
    what = rule.action if rule.enforcing else f"observed only ({rule.action})"
    return (
        f"{rule.id:<14} {rule.metric.label} > {limit} over {rule.window_s} s{held}, from {rule.min_samples}"
        f" samples, in {', '.join(rule.scopes)}: {what}"
    )


def summary(policy: Policy) -> dict[str, object]:
    """The policy as one JSON object."""
    return {
        "ok": True,
        "hash": policy.hash,
        "window_s": policy.window_s,
        "rules": [
            {
                "id": rule.id,
                "capability": rule.capability,
                "metric": rule.metric.label,
                "window_s": rule.window_s,
                "limit": float(rule.limit),
                "min_samples": rule.min_samples,
                "hold_s": rule.hold_steps,
                "scope": list(rule.scopes),
                "arm": rule.arm,
                "traffic": rule.traffic,
                "action": rule.action,
                "mode": rule.mode,
            }
            for rule in policy.rules
        ],
        "coverage": {
            "limit": float(policy.coverage.limit),
            "window_s": policy.coverage.window_s,
            "min_samples": policy.coverage.min_samples,
            "action": policy.coverage.action,
        },
        "progression": {"mode": policy.progression.mode, "min_pairs": policy.progression.min_pairs},
    }


def _is_latency(rule: Rule) -> bool:
    return rule.metric.kind == "latency" and rule.metric.statistic != "share"
