"""Options that every command shares: `--config FILE` and `--json`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from pipeline.cli.exits import CommandError, Exit
from pipeline.config import Config, ConfigError, load_config, load_gateway_config

F = TypeVar("F", bound=Callable[..., Any])


def config_option(function: F) -> F:
    """Add `--config FILE`; the command receives `config: Config`, resolved. A mistake exits with 2."""
    return _with_config(function, load_config)


def gateway_config_option(function: F) -> F:
    """The same for the gateway, whose section must be there, with every file that it names."""
    return _with_config(function, load_gateway_config)


def _with_config(function: F, load: Callable[[str | None, Mapping[str, str]], Config]) -> F:
    @click.option("--config", "config_path", metavar="FILE", help="Configuration file (else KLAXON_CONFIG).")
    @functools.wraps(function)
    def with_config(*args: Any, config_path: str | None, **kwargs: Any) -> Any:
        try:
            config = load(config_path, os.environ)
        except ConfigError as error:
            raise CommandError(str(error), Exit.USAGE) from None
        return function(*args, config=config, **kwargs)

    return with_config  # type: ignore[return-value]  # functools.wraps keeps the command's own signature


def json_option(function: F) -> F:
    """Add `--json`; the command receives `as_json: bool` and then prints exactly one JSON object."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")(
        function
    )


def speed(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Callback of an option that says how many times faster: above 0, and finite."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter("a speed is a number greater than 0", param=parameter)
    return value


def seconds(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Callback of an option that is a time in seconds: above 0, and finite (NaN compares with nothing)."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter("a number of seconds above 0 is expected", param=parameter)
    return value
