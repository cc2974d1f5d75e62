"""The deciding event is found in the log by the decision's input vector, on the embedded broker."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from pipeline.cli.demo.embedded_broker import embedded_broker
from pipeline.cli.demo.fleet import EventMaker, Turn
from pipeline.cli.demo.observe import deciding_publish_us, find_decision, sources_closed
from pipeline.cli.demo.play import Sent
from pipeline.cli.demo.recording import About, Answer
from pipeline.cli.demo.traffic import Arrival
from schemas.codec import encode_logits, logit_columns
from schemas.columns import BatchHeader
from schemas.control import Decision, Inputs, Located
from schemas.events import Arm, LogitEvent
from schemas.topics import COLUMNS, CONTENT_TYPE, Topic
from tests.demo.test_report import directive

pytestmark = pytest.mark.slow

ABOUT = About(recording=1, model="m", engine="e", definition="raw", precision=6, boundary_tokens=2048)


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with embedded_broker() as address:
        yield address


def half(pair: int, arm: Arm, node: str) -> LogitEvent:
    answer = Answer(
        prompt_id="p",
        side="long",
        variant="baseline",
        input_tokens=3000,
        ttft_us=1,
        duration_us=2,
        ended=True,
        tokens=(1,),
        top_ids=((1,),),
        top_logprobs=((-0.5,),),
    )
    turn = Turn(Arrival(0, "chat", 3000), 5, 1, "p", f"{pair:032x}", ("baseline", "canary"), "baseline")
    return EventMaker(ABOUT, 1).make(turn, arm, node, answer, affected=False).logit


async def test_the_newest_pair_of_the_cell_that_was_read_decides(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics(
        [NewTopic(Topic.LOGITS, 2, 1), NewTopic(Topic.DECISIONS, 4, 1), NewTopic(Topic.BUCKETS, 4, 1)]
    )
    await admin.close()
    nodes = {1: "canary-3", 2: "canary-1", 3: "canary-3", 4: "canary-3"}
    sent = {
        f"{pair:032x}": Sent(pair * 100, "canary", node, 3000, affected=True) for pair, node in nodes.items()
    }
    place = Located(dimension="node_context", value="canary-3|>2048", share_of_excess=1, share_of_traffic=0.1)
    inputs = Inputs(
        # Partition 0 was read through its third record, where pair 3 has its first half only.
        offsets={"~klaxon.logits/0": 2, "klaxon.logits/0": 0, "klaxon.logits/1": 0, "klaxon.requests/0": 9},
        command_offset=0,
        complete_through=-1,
        now_us=1,
    )
    decision = Decision(kind="trip", directive=directive(0.0, "tripped", place), inputs=inputs)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()

    async def write(partition: int, *events: LogitEvent) -> None:
        value = encode_logits(logit_columns(list(events)), BatchHeader("p", 0, {}))
        headers = [(CONTENT_TYPE, COLUMNS.encode())]
        await producer.send_and_wait(Topic.LOGITS, value, partition=partition, headers=headers)

    try:
        await write(0, half(1, "baseline", "base-1"), half(1, "canary", "canary-3"))
        await write(0, half(2, "baseline", "base-1"), half(2, "canary", "canary-1"))
        await write(0, half(3, "baseline", "base-1"))
        await write(0, half(3, "canary", "canary-3"))
        await write(1, half(9, "canary", "canary-3"))
        await write(1, half(4, "baseline", "base-1"), half(4, "canary", "canary-3"))
        other = msgspec.structs.replace(decision, directive=None)
        for one in (other, decision):
            await producer.send_and_wait(Topic.DECISIONS, msgspec.json.encode(one), partition=2)
        await producer.send_and_wait(Topic.BUCKETS, b"x", key=b"klaxon.logits/0", partition=1)
    finally:
        await producer.stop()

    renewed = msgspec.structs.replace(directive(0.0, "tripped", place), epoch=9)
    found = await find_decision(bootstrap, renewed)
    assert found == decision
    assert await deciding_publish_us(bootstrap, found, sent, place) == 100
    further = msgspec.structs.replace(
        found, inputs=msgspec.structs.replace(inputs, offsets={"klaxon.logits/0": 3, "klaxon.logits/1": 0})
    )
    assert await deciding_publish_us(bootstrap, further, sent, place) == 300
    assert await deciding_publish_us(bootstrap, further, {}, place) is None
    assert await sources_closed(bootstrap, ["klaxon.logits/0"], 60.0) == set()
    assert await sources_closed(bootstrap, ["klaxon.logits/1"], 2.0) == {"klaxon.logits/1"}
