"""Every query in docs/archive.md runs."""

from __future__ import annotations

import re

import pytest

from pipeline.store.client import Store
from pipeline.store.queries import run_query
from tests.conftest import REPOSITORY

QUERIES = re.findall(r"```sql\n(.*?)```", (REPOSITORY / "docs" / "archive.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: str(QUERIES.index(query)))
def test_query_runs(store: Store, query: str) -> None:
    assert run_query(store, query).names


def test_there_are_queries() -> None:
    assert len(QUERIES) >= 8
