"""What clickhouse-connect alone costs for the archive's rows: no Kafka, no promise.

    plain_insert.py run DSN FILE      insert the rows of the records in FILE; DSN: a chDB folder

The rows are prepared as the archive prepares them, then turned into the lists that the driver's `insert`
takes, before the clock starts. CPU is process time over the inserts, one for each partition's rows. Run again
on the same folder, with other offsets, rows are added: merges are then a part of it. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import clickhouse_connect
import msgspec

from pipeline.store.archive import TABLES, read_record
from pipeline.store.blocks import Block, BlockCutter, BlockLimits
from pipeline.store.client import INSERT_SETTINGS, connect
from pipeline.store.columns import listed
from pipeline.store.migrate import migrate
from pipeline.workers.records import Record
from schemas.topics import CONTENT_TYPE, Topic
from tests.bench.backlog import Out

DATABASE = "klaxon"


def blocks(path: Path) -> list[Block]:
    """The archive's blocks of these records, as large as it ever makes them."""
    cutters: dict[int, BlockCutter] = {}
    table = TABLES[Topic.REQUESTS]
    for partition, offset, out in msgspec.msgpack.decode(path.read_bytes(), type=list[tuple[int, int, Out]]):
        record = Record(
            topic=Topic.REQUESTS,
            partition=partition,
            offset=offset,
            append_us=out.timestamp_ms * 1000,
            timestamp_type=0,
            headers={CONTENT_TYPE: out.content_type.encode()},
            key=None,
            value=out.value,
        )
        cutter = cutters.get(partition)
        if cutter is None:
            # Tokens of an earlier run would be taken for repetitions.
            boot_id = f"plain-{time.time_ns()}"
            cutter = BlockCutter(table, Topic.REQUESTS.value, partition, BlockLimits(), boot_id)
            cutters[partition] = cutter
        rows, _ = read_record(Topic.REQUESTS, record)
        cutter.add(offset, record.append_us, rows, 0)
    cut = []
    for cutter in cutters.values():
        while block := cutter.take(0, force=True):
            cut.append(block)
    return cut


def run(dsn: str, path: Path) -> None:
    """Insert and print."""
    store = connect(dsn, DATABASE, create_database=True)
    migrate(store, now_us=1)
    client = clickhouse_connect.get_client(dsn=dsn, database=DATABASE)
    todo = [
        (block, list(block.columns), [listed(column) for column in block.columns.values()])
        for block in blocks(path)
    ]
    names = todo[0][1]
    # The first insert imports pandas: not what an insert costs.
    client.command("CREATE TEMPORARY TABLE warm_up (n UInt8) ENGINE = Memory")
    client.insert("warm_up", [[0]], column_names=["n"], column_oriented=True)
    types = client.create_insert_context(todo[0][0].table, column_names=names).column_types
    count = f"SELECT count() FROM {todo[0][0].table}"
    ((before,),) = client.query(count).result_rows
    rows = 0
    started_s = time.process_time()
    for block, names, columns in todo:
        client.insert(
            block.table,
            columns,
            column_names=names,
            column_types=types,
            column_oriented=True,
            settings={**INSERT_SETTINGS, "insert_deduplication_token": block.token},
        )
        rows += block.rows
    spent_s = time.process_time() - started_s
    ((stored,),) = client.query(count).result_rows
    if stored - before != rows:
        sys.exit(f"{stored - before} rows are stored, {rows} were inserted")
    print(json.dumps({"events": rows, "events_per_cpu_s": round(rows / spent_s)}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", dsn, path]:
            run(dsn, Path(path))
        case _:
            sys.exit(__doc__)
