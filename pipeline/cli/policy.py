"""`klaxon policy check FILE`: read a policy as the gate would, and say what it will do."""

from __future__ import annotations

import click
import msgspec

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.options import config_option, json_option
from pipeline.config import Config
from pipeline.core.gate.policy import LEAVING_OUT, Policy, Rule, alpha_ledger
from pipeline.core.gate.policy_cautions import cautions
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

    A mistake is named with its line: exit code 2. Then what it may not mean as it stands: rules that are
    known to cry wolf, actions that never fire. Such cautions change no exit code: the policy is good.

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
    for line in ledger_lines(read):
        click.echo(line)
    coverage, progression = read.coverage, read.progression
    click.echo(
        f"coverage  below {float(coverage.limit):g} over {coverage.window_s} s:"
        f" {'no weight step' if coverage.action == 'hold' else 'pause'}"
    )
    click.echo(
        f"steps     {progression.mode}, at least {progression.min_pairs} pairs and"
        f" {read.window_s} s (longest window) + join timeout each"
    )
    if any(rule.enforcing and rule.action in LEAVING_OUT for rule in read.rules):
        click.echo(
            f"ejection  at most {float(read.ejection.max_share * 100):g} % of the canary's nodes; more:"
            " rollback_l1"
        )
    click.echo(f"sha256    {read.hash}")
    for one in cautions(read):
        click.echo(f"caution   {f'{one.rule}: ' if one.rule else ''}{one.sentence}")
        click.echo(f"          → {one.remedy}")
    return Exit.OK


def rule_line(rule: Rule) -> str:
    """One rule for a person."""
    limit = f"{float(rule.limit) / 1000:g} ms" if _is_latency(rule) else f"{float(rule.limit):g}"
    held = f" for {rule.hold_steps} s" if rule.hold_steps > 1 else ""
    what = rule.action if rule.enforcing else f"observed only ({rule.action})"
    judged = ", anytime evidence" if rule.sequential else f" over {rule.window_s} s{held}"
    return (
        f"{rule.id:<14} {rule.label} > {limit}{judged}, from {rule.min_samples} samples, in"
        f" {', '.join(rule.scopes)}: {what}"
    )


def ledger_lines(policy: Policy) -> list[str]:
    """Who spends the chance of a false trip, and from which evidence on; [] where no rule is judged so."""
    ledger = alpha_ledger(policy)
    if not ledger:
        return []
    sharing = sum(one.shared for one in ledger)
    shared = f", shared by {sharing} rule{'s' * (sharing != 1)}" if sharing else ""
    lines = [f"alpha     {float(policy.alpha):g} is the chance of a false trip in a generation{shared}:"]
    for one in ledger:
        whose = "" if one.shared else " of its own: it ends no generation"
        lines.append(
            f"          {one.rule.id} {float(one.trip):.4g}{whose}, trips at evidence {one.bound:.6g};"
            f" its pass is tested at {float(one.passing):g}, evidence {float(1 / one.passing):.6g}"
        )
    if sharing:
        lines.append(
            "          in a generation that had other policies before, only what they left of it: more"
            " evidence is needed then"
        )
    return lines


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
                "metric": rule.label,
                "relative_to": rule.relative_to,
                "window_s": rule.window_s,
                "limit": float(rule.limit),
                "min_samples": rule.min_samples,
                "hold_s": rule.hold_steps,
                "scope": list(rule.scopes),
                "arm": rule.arm,
                "traffic": rule.traffic,
                "action": rule.action,
                "mode": rule.mode,
                "evidence": rule.evidence,
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
        "alpha": {
            "alpha": float(policy.alpha),
            "rules": [
                {
                    "id": one.rule.id,
                    "trip": float(one.trip),
                    "evidence_bound": one.bound,
                    "passing": float(one.passing),
                    "shared": one.shared,
                }
                for one in alpha_ledger(policy)
            ],
        },
        "cautions": cautions(policy),
        "ejection": {"max_share": float(policy.ejection.max_share)},
    }


def _is_latency(rule: Rule) -> bool:
    return rule.metric.kind == "latency" and rule.metric.statistic != "share" and rule.relative_to is None
