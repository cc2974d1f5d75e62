"""What the bench of scaling reads is what it says. No speed is asserted here."""

from __future__ import annotations

import msgspec
import pytest

from schemas.codec import decode_requests
from schemas.columns import RequestColumns
from schemas.topics import JSON, Topic
from tests.bench.backlog import Backlog, Batch
from tests.bench.scaling import COUNTS, Axis, Shape

T = 1_700_000_000_000_000
LASTS_US = 800_000


def backlog() -> Backlog:
    """Two requests, 0.8 s apart."""
    events = [
        {"v": 1, "rollout": "r", "arm": "canary", "pair_id": f"p{at_us}", "signature": f"{at_us:032x}",
         "ts_us": T + at_us, "duration_us": 1000, "node": "n", "input_tokens": 9, "model_version": "m",
         "shadow": False, "status": 200, "output_tokens": 1}
        for at_us in (0, LASTS_US)
    ]  # fmt: skip
    columns = decode_requests(msgspec.json.encode(events), JSON).columns
    assert isinstance(columns, RequestColumns)
    first_us, last_us = T + 1000, T + LASTS_US + 1000
    return Backlog(Topic.REQUESTS, 4, [Batch(0, columns, last_us)], 2, first_us, last_us)


@pytest.mark.parametrize("axis", COUNTS)
def test_more_of_them_bring_more_of_other_events_in_the_same_time(axis: Axis) -> None:
    lasts = set()
    for count in COUNTS[axis]:
        shape = Shape.of(axis, count, "grown")
        read = backlog().paced(shape.speed).repeated(shape.times)
        lasts.add(read.last_us - read.first_us)
        signatures = {each.tobytes() for batch in read.batches for each in batch.columns.signature}
        completed = [int(each) for batch in read.batches for each in batch.columns.ts_us + 1000]
        assert len(signatures) == read.events == 2 * count
        assert (min(completed), max(completed)) == (read.first_us, read.last_us)
        assert read.batches[-1].newest_us == read.last_us
    assert lasts == {4 * LASTS_US if axis == "partitions" else LASTS_US}


@pytest.mark.parametrize("axis", COUNTS)
def test_short_traffic_is_cut_off_and_spread_traffic_is_thinner(axis: Axis) -> None:
    for count in COUNTS[axis]:
        grown, short, spread = (Shape.of(axis, count, each) for each in ("grown", "short", "spread"))
        assert (short.speed, short.times) == (grown.speed, 1)
        assert (spread.speed, spread.times) == (1.0, 1)
