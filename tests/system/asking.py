"""Queries on the archive, all in one process: `python -m tests.system.asking QUERY…` prints a JSON list.

Configured like the workers. The embedded engine takes seconds to open, once per process.
"""

from __future__ import annotations

import json
import os
import sys

from pipeline.config import load_config
from pipeline.store.client import connect_read_only
from pipeline.store.queries import run_query

if __name__ == "__main__":
    clickhouse = load_config(None, os.environ).clickhouse
    store = connect_read_only(
        clickhouse.dsn,
        clickhouse.database,
        username=clickhouse.username,
        password=clickhouse.password.reveal(),
    )
    print(json.dumps([run_query(store, query).as_json()["rows"] for query in sys.argv[1:]]))
    store.close()
