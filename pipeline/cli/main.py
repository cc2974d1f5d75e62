"""The `klaxon` command: one lazy group, one exit-code contract.

Every command lives in a module of its own, imported only when it is called, so that `klaxon --help` needs
no numpy and a broken optional package cannot take the whole command line down.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Final

import click

from pipeline.cli.exits import CommandError, error_json

COMMANDS: Final[dict[str, str]] = {
    "compare": "pipeline.cli.compare:compare",
    "demo": "pipeline.cli.demo.command:demo",
    "worker": "pipeline.cli.worker:worker",
    "rollout": "pipeline.cli.rollout:rollout",
    "router": "pipeline.cli.router:router",
    "gateway": "pipeline.cli.gateway:gateway",
    "topics": "pipeline.cli.topics:topics",
    "notify": "pipeline.cli.notify:notify",
    "migrate": "pipeline.cli.migrate:migrate",
    "status": "pipeline.cli.status:status",
    "explain": "pipeline.cli.explain:explain_command",
    "sample-size": "pipeline.cli.sample_size:sample_size",
    "doctor": "pipeline.cli.doctor.command:doctor",
    "publish": "pipeline.cli.publish:publish",
    "watch": "pipeline.cli.watch:watch",
    "policy": "pipeline.cli.policy:policy",
    "keys": "pipeline.cli.keys:keys",
    "sql": "pipeline.cli.sql:sql",
}
"""Command name → `module:attribute` of its click command."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module_name, attribute = target.split(":")
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="klaxon")
def cli() -> None:
    """Gate the roll-out of LLM inference: compare canary with baseline, token by token.

    \b
    Example:
      klaxon demo
      klaxon compare baseline.jsonl canary.jsonl
      klaxon gateway --config klaxon.yaml --check
    """


def _wants_json() -> bool:
    """Whether the command line says --json: a command that it does not fit is none that could be asked."""
    arguments = sys.argv[1:]
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


def main() -> None:
    """Run the command line; the process exits with the code of interface contract (0-4)."""
    for stream in (sys.stdout, sys.stderr):
        # Names of files and ids come from outside: half a character in one must not end a command. Inside
        # JSON it then stands as the escape it came as.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False)
    except CommandError as error:
        click.echo(f"klaxon: {error}", err=True)
        if _wants_json():
            click.echo(error_json(str(error)))
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        click.echo("klaxon: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        if _wants_json():
            click.echo(error_json(error.format_message()))
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
