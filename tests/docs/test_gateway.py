"""docs/gateway.md: its configuration loads, its example is printed, its tables are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from agents.gateway.counts import Mirror, Note, Request
from agents.gateway.otel_spans import OtelSpans
from agents.gateway.settings import EngineKind, HeaderSettings
from pipeline.cli.exits import Exit
from pipeline.cli.main import cli
from pipeline.config import load_gateway_config
from pipeline.monitoring.metrics import METRICS
from tests.agents.gateway.test_spans import Seen, one_request
from tests.docs.gateway import PAGE, page

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_example_and_the_metrics_are_the_real_ones() -> None:
    assert page() == TEXT, "python -m tests.docs.gateway --write"


def test_the_worked_configuration_is_all_that_a_gateway_wants(tmp_path: Path) -> None:
    """With keys where it says, made as it says: what is left to complain of is that no engine is there."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    made = re.findall(r"`klaxon keys create /etc/klaxon/keys(| --for gateway)`", TEXT)
    assert sorted(made) == ["", " --for gateway"]
    folder = tmp_path / "etc"
    for more in made:
        done = CliRunner().invoke(cli, ["keys", "create", str(folder / "keys"), *more.split()])
        assert done.exit_code == 0, done.output
    (folder / "mirror-credential").write_text("Bearer mirror\n")
    (folder / "mirror-credential").chmod(0o600)
    path = tmp_path / "klaxon.yaml"
    nobody = re.sub(r"http://gpu-(\d):8000", r"http://127.0.0.\1:1", block)
    path.write_text(nobody.replace("/etc/klaxon", str(folder)))
    checked = CliRunner().invoke(cli, ["gateway", "--config", str(path), "--check"], standalone_mode=False)
    assert (checked.exception, checked.return_value) == (None, Exit.UNREACHABLE), checked.output
    settings = load_gateway_config(str(path), {}).gateway
    assert [pool.arm for pool in settings.pools] == ["baseline", "canary"]
    assert (settings.mirror.rate, settings.mirror.tokens_per_s) == (0.05, 2_000)


def test_the_sum_for_the_budget_is_right() -> None:
    number = r"([\d.]+)"
    product = r" ·\s+".join([number] * 4)
    found = re.search(rf"`p · r · t · c`.*?:\s+{product} = ([\d,]+)", TEXT, re.DOTALL)
    assert found is not None
    rate, requests, tokens, copies = map(float, found.groups()[:4])
    assert rate * requests * tokens * copies == float(found[5].replace(",", ""))
    assert 2 / requests == rate, "two pairs a second"


def commands() -> list[str]:
    in_blocks = re.findall(r"^(?:\$ )?klaxon (.+)$", TEXT, flags=re.MULTILINE)
    return sorted({*in_blocks, *re.findall(r"`klaxon ([^`…]+)`", TEXT)})


@pytest.mark.parametrize("command", commands())
def test_every_command_line_parses(command: str) -> None:
    words = shlex.split(command)
    group: click.Command = cli
    context = click.Context(cli)
    while isinstance(group, click.Group) and words:
        found = group.get_command(context, words[0])
        assert found is not None, command
        group, words = found, words[1:]
    with group.make_context(group.name, words):
        pass


def test_every_engine_and_header_is_named() -> None:
    for kind in get_args(EngineKind):
        assert f"| `{kind}`" in TEXT
    defaults = HeaderSettings()
    shown = TEXT.lower()
    for name in HeaderSettings.__struct_fields__:
        header: str = getattr(defaults, name)
        assert f"`{header}`" in shown or f"`{header.removeprefix('x-klaxon')}`" in shown, header


def test_spans_and_attributes_are_the_real_ones() -> None:
    """As a request of every feature has them; `gen_ai.request.*` and `gen_ai.usage.*` stand for theirs."""
    seen = Seen()
    one_request(seen.spans)
    for span in seen.exporter.get_finished_spans():
        first = re.compile(rf"\|[^|]*`{re.escape(span.name)}`[^|]*\|")
        (row,) = [line for line in TEXT.splitlines() if first.match(line)]
        for attribute in span.attributes or {}:
            family = ".".join(attribute.split(".")[:2]) + ".*"
            assert f"`{attribute}`" in row or f"`{family}`" in row, (span.name, attribute)
    assert isinstance(seen.spans, OtelSpans)


def test_counts_in_the_table_of_faults_exist() -> None:
    section = TEXT.split("## Faults, and what users see")[1].split("##")[0]
    known = {*Request, *Note, *Mirror}
    metrics = {metric.name for metric in METRICS}
    named = set(re.findall(r"`([a-z_]+)(?:\{[^`]*\})?`", section))
    settings = {"first_byte_timeout_s", "producer_queue_events"}
    errors = {"connect", "timeout", "overload", "refused", "oom", "engine", "client"}
    gauges = {"engines_lost"}
    assert named <= known | metrics | settings | errors | gauges, named - known - metrics
