"""`klaxon rollout …`: an operator's commands to the gate, through the log, and its answers."""

from __future__ import annotations

import getpass
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from pipeline.cli.break_glass import break_glass
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.gate_link import ask, run, signer_of_commands
from pipeline.cli.options import config_option, json_option, seconds
from pipeline.cli.spec_file import read_spec
from pipeline.cli.standing import human, read_standings, silent_after_us
from pipeline.config import Config
from pipeline.core.visible import visible
from pipeline.policy_file import PolicyError, read_policy_file
from schemas.control import Aborted, Command, CommandName, Decision, Expects

ANSWER_S: Final = 30.0


@click.group()
def rollout() -> None:
    """Start roll-outs, see where they stand, and move them.

    Every command goes through the log; the gate's answer is printed. Exit codes: 0 obeyed, 1 refused
    by the gate, 2 wrong input, 3 no broker or no gate, 4 refused because there is no pass yet.

    Example: klaxon rollout start spec.yaml --policy docs/examples/observe.yaml
    """


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option(
        "--timeout", "timeout_s", type=float, default=ANSWER_S, show_default=True, metavar="SECONDS",
        callback=seconds,
        help="How long to wait for the gate's answer.",
    )(function)  # fmt: skip
    function = click.option(
        "--expect", metavar="GENERATION,EPOCH", help="Refuse unless the roll-out stands exactly there."
    )(function)
    return config_option(json_option(function))


@rollout.command()
@click.argument("spec", type=click.Path(dir_okay=False))
@click.option("--policy", "policy_path", metavar="FILE", help="Policy file, instead of the spec's own.")
@_options
def start(
    spec: str, policy_path: str | None, config: Config, as_json: bool, expect: str | None, timeout_s: float
) -> int:
    """Start the roll-out that SPEC describes. Refused without a fallback version.

    Without --policy (and without one in SPEC) the shipped policy holds, which enforces. For a first week
    docs/examples/observe.yaml judges everything and moves nothing.

    Example: klaxon rollout start spec.yaml --policy docs/examples/observe.yaml
    """
    read = read_spec(spec, policy_path)
    arguments: dict[str, object] = {"spec": msgspec.to_builtins(read)}
    return _tell(config, "start", read.rollout, arguments, expect, timeout_s, as_json)


@rollout.command()
@click.argument("name", metavar="[ROLLOUT]", required=False)
@config_option
@json_option
def status(name: str | None, config: Config, as_json: bool) -> int:
    """Where roll-outs stand: weights, lease, cause, and what the next step waits for. Only reads.

    Example: klaxon rollout status chat --json
    """
    standings = run(read_standings(config))
    chosen = [one for one in standings if name is None or one.rollout == name]
    if name is not None and not chosen:
        raise CommandError(f"there is no roll-out {name!r}; `klaxon rollout status` lists them", Exit.USAGE)
    if as_json:
        click.echo(msgspec.json.encode({"rollouts": chosen}).decode())
        return Exit.OK
    for one in chosen:
        click.echo(human(one, time.time_ns() // 1000, silent_after_us(config.gate)))
    if not chosen:
        click.echo("no roll-out is known; start one with `klaxon rollout start SPEC`")
    return Exit.OK


@rollout.command("new-generation")
@click.argument("name", metavar="ROLLOUT")
@click.option("--spec", "spec_path", metavar="FILE", help="Begin with this spec.")
@click.option("--policy", "policy_path", metavar="FILE", help="Policy file (with --spec).")
@_options
def new_generation(
    name: str,
    spec_path: str | None,
    policy_path: str | None,
    config: Config,
    as_json: bool,
    expect: str | None,
    timeout_s: float,
) -> int:
    """Begin anew at the first weight step, after a trip for instance.

    Example: klaxon rollout new-generation chat
    """
    arguments: dict[str, object] = {}
    if spec_path is not None:
        arguments["spec"] = msgspec.to_builtins(read_spec(spec_path, policy_path))
    elif policy_path is not None:
        raise CommandError(
            "--policy goes with --spec here; `klaxon rollout policy` changes it alone", Exit.USAGE
        )
    return _tell(config, "new_generation", name, arguments, expect, timeout_s, as_json)


@rollout.command()
@click.argument("name", metavar="ROLLOUT")
@click.argument("file", type=click.Path(dir_okay=False))
@_options
def policy(name: str, file: str, config: Config, as_json: bool, expect: str | None, timeout_s: float) -> int:
    """Put another policy in force; its windows begin empty.

    Example: klaxon rollout policy chat policy.yaml
    """
    try:
        text = read_policy_file(file).text
    except PolicyError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    return _tell(config, "policy", name, {"policy": text}, expect, timeout_s, as_json)


def _simple(command: CommandName, text: str) -> None:
    """Add a command that has nothing but a roll-out's name."""

    @click.argument("name", metavar="ROLLOUT")
    @_options
    def tell(name: str, config: Config, as_json: bool, expect: str | None, timeout_s: float) -> int:
        return _tell(config, command, name, {}, expect, timeout_s, as_json)

    help_text = f"{text}\n\nExample: klaxon rollout {command} chat"
    rollout.command(command, help=help_text)(tell)


_simple("pause", "Hold the weight where it is.")
_simple("resume", "Go on after a pause.")
_simple("step", "Take the next weight step; refused without a pass.")
_simple("promote", "Give the canary all traffic; refused without a pass.")
_simple("retire", "Strike a finished roll-out off the books.")


@rollout.command()
@click.argument("name", metavar="ROLLOUT")
@click.argument("more", nargs=-1, metavar="", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--router", "files", multiple=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE...",
    help="Break glass: write these routers' directive files instead, without Kafka.",
)  # fmt: skip
@click.option(
    "--fallback", metavar="VERSION", help="With --router: what gets all where a router has no directive."
)
@_options
def abort(
    name: str,
    more: tuple[Path, ...],
    files: tuple[Path, ...],
    fallback: str | None,
    config: Config,
    as_json: bool,
    expect: str | None,
    timeout_s: float,
) -> int:
    """Take the canary out of rotation, for good in this generation.

    With --router nothing is sent: each FILE is what a router on this machine watches (`klaxon router --file
    FILE`). It gives everything to the fallback version within a second and stays there, whatever the control
    topic says, until the file is removed. That needs no key: a file can only lower a weight.

    \b
    Example:
      klaxon rollout abort chat
      klaxon rollout abort chat --router /var/lib/klaxon/router.json --fallback v1
    """
    if not files and (more or fallback is not None):
        raise CommandError("files and --fallback go with --router FILE", Exit.USAGE)
    if not files:
        return _tell(config, "abort", name, {}, expect, timeout_s, as_json)
    if expect is not None:
        raise CommandError("--expect goes through the gate; --router asks nobody", Exit.USAGE)
    order = Aborted(by=_operator()[:256] or "unknown", ts_us=time.time_ns() // 1000, fallback=fallback)
    written, failed = break_glass((*files, *more), name, order)
    if as_json:
        told = {"rollout": name, "aborted": not failed, "written": written, "failed": failed}
        click.echo(msgspec.json.encode(told).decode())
    else:
        for path in written:
            click.echo(f"{path}: {name} is aborted at the router that watches it, until the file is removed")
    for problem in failed.values():
        click.echo(f"klaxon: {problem}", err=True)
    click.echo(f"the gate does not know of it: when Kafka is back, `klaxon rollout abort {name}`", err=True)
    return Exit.USAGE if failed else Exit.OK


def _tell(
    config: Config,
    command: CommandName,
    name: str,
    arguments: dict[str, object],
    expect: str | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    sent = Command(
        v=1,
        command_id=uuid.uuid4().hex,
        rollout=name,
        ts_us=time.time_ns() // 1000,
        command=command,
        arguments=arguments,
        by=_operator(),
        expects=_expects(expect),
    )
    try:
        msgspec.convert(msgspec.to_builtins(sent), Command)
    except msgspec.ValidationError as error:  # the gate would put it away unanswered
        raise CommandError(f"{command} {name[:60]!r}: {error}", Exit.USAGE) from None
    decision = run(ask(config.kafka, sent, timeout_s, signer_of_commands(config)))
    if as_json:
        answer = {"accepted": decision.kind == "command", "command_id": sent.command_id, "decision": decision}
        click.echo(msgspec.json.encode(answer).decode())
    else:
        click.echo(answer_line(name, decision), err=decision.kind != "command")
    return exit_code(decision)


def answer_line(name: str, decision: Decision) -> str:
    """The gate's answer for a person."""
    if decision.kind != "command" or decision.directive is None:
        return visible(f"{name}: refused: {decision.reason}")
    directive = decision.directive
    split = " · ".join(f"{version} {percent:g} %" for version, percent in directive.weights.items())
    return visible(
        f"{name}: {decision.reason} · generation {directive.generation} epoch {directive.epoch}"
        f" · {directive.state} · {split}"
    )


def exit_code(decision: Decision) -> Exit:
    """0 obeyed; refused by the gate: 4 where only the pass is missing, else 1."""
    if decision.kind == "command":
        return Exit.OK
    return Exit.NOT_ENOUGH_DATA if ": no pass: " in decision.reason else Exit.BAD


def _expects(text: str | None) -> Expects | None:
    if text is None:
        return None
    try:
        generation, epoch = (int(part) for part in text.split(","))
        return msgspec.convert({"generation": generation, "epoch": epoch}, Expects)
    except (ValueError, msgspec.ValidationError):
        raise CommandError(
            f"--expect {text!r}: GENERATION,EPOCH is expected, such as 2,17", Exit.USAGE
        ) from None


def _operator() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
