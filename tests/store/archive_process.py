"""An archive worker without Kafka, in a process of its own, that dies where it is told to.

`python -m tests.store.archive_process FOLDER SEED RECORDS FAULT [NTH]` reads a log of that seed from the
position the archive names, keeps its commit in FOLDER.commit, and exits 137 at the NTH passing of FAULT.
FAULT `none` reads to the end; `verify` prints what the table holds. `inside_insert` dies at a random moment
after an insert began. Prints one JSON object a line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

from pipeline.store.archive import Archive
from pipeline.store.blocks import BlockLimits
from pipeline.store.client import connect
from pipeline.store.migrate import migrate
from schemas.topics import Topic
from tests.store.records import request_log

EXIT_CODE = 137
PARTITIONS = 2
INSIDE_AT_MOST_S = 0.02


class Fault:
    """Ends the process at the nth passing of a point."""

    def __init__(self, point: str, nth: int, rng: random.Random) -> None:
        self.point, self.left, self.rng = point, nth, rng

    def passing(self, point: str) -> None:
        if self.point == "inside_insert" and point == "before_insert":
            self.left -= 1
            if self.left == 0:
                threading.Thread(target=self._die_soon, daemon=True).start()
        elif point == self.point:
            self.left -= 1
            if self.left == 0:
                self._die()

    def _die_soon(self) -> None:
        time.sleep(self.rng.uniform(0, INSIDE_AT_MOST_S))
        self._die()

    def _die(self) -> None:
        os.write(1, json.dumps({"fault": self.point}).encode() + b"\n")
        os._exit(EXIT_CODE)


def main(folder: str, seed: str, records: str, point: str, nth: str = "1") -> None:
    store = connect(f"chdb://{folder}", "klaxon", create_database=True)
    migrate(store, now_us=1)
    if point == "verify":
        rows = store.rows("SELECT part, off, pos FROM inference_log ORDER BY part, off, pos")
        print(json.dumps({"rows": rows}), flush=True)
        store.close()
        return
    rng = random.Random(f"{seed}-{point}-{nth}-{os.getpid()}")
    fault = Fault(point, int(nth), rng)
    limits = BlockLimits(rng.choice([20, 60, 200]), 1 << 20, 100)
    archive = Archive(store, limits, f"{os.getpid()}", passing=fault.passing)
    for partition in range(PARTITIONS):
        fault.passing("on_assignment")
        part = archive.open_partition(Topic.REQUESTS, partition)
        committed = Path(f"{folder}.commit-{partition}")
        stop, now_us = threading.Event(), 0

        def store_due(force: bool = False) -> None:
            while block := part.take(now_us, force=force):  # noqa: B023 (called in this turn only)
                assert archive.store_block(block, stop)  # noqa: B023
                fault.passing("before_commit")
                committed.write_text(str(part.stored(block)))  # noqa: B023
                fault.passing("after_commit")

        for record in request_log(int(seed) + partition, int(records)):
            now_us += 10
            fault.passing("after_read")
            part.add(record, now_us)
            store_due(force=part.full)
        store_due(force=True)
    store.close()
    print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
