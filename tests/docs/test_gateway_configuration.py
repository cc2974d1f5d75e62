"""docs/gateway-configuration.md names every key, as the code reads it."""

from __future__ import annotations

import re

from agents.gateway.mirroring import Reason
from agents.gateway.routing import Why
from pipeline.gateway_config import fields, variables
from tests.docs.gateway_configuration import PAGE, TABLES, meanings, page, tables


def test_the_tables_are_the_structures() -> None:
    assert PAGE.read_text() == page(), "python -m tests.docs.gateway_configuration --write"


def test_every_key_stands_in_a_table() -> None:
    """By the names of variables, which are found another way."""
    rows = {line.split("`")[1] for line in tables().splitlines() if line.startswith("| `")}
    assert {part for path, _ in variables() for part in path} <= rows
    for kind in TABLES.values():
        nested = {name for name, held, is_list in fields(kind) if held is not None and not is_list}
        assert set(meanings(kind)) == set(kind.__struct_fields__) - nested


def test_reasons_and_metrics_on_the_page_exist() -> None:
    text, metrics = PAGE.read_text(), (PAGE.parent / "gateway.md").read_text()
    assert all(f"| `{reason}` |" in text for reason in Reason)
    named = set(re.findall(r"`(klaxon_gateway_\w+)", text))
    assert len(named) == 5
    assert [name for name in named if f"| `{name}` (" not in metrics] == [], (
        "docs/gateway.md lists what is exposed"
    )
    assert f'reason="{Why.UNKNOWN_VERSION}"' in text
