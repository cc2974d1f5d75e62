"""An event that readers would refuse is dropped where it is made: counted and reported, never unseen."""

from __future__ import annotations

from typing import Any

import pytest

from agents.gateway.settings import MirrorSettings
from agents.publish.batches import is_readable
from schemas import codec
from schemas.topics import Topic
from tests.agents.gateway.harness import Engine, running, until
from tests.agents.gateway.test_server import as_asked


@pytest.mark.parametrize(
    ("topic", "field", "value"),
    [
        (Topic.REQUESTS, "status", 5_000),
        (Topic.REQUESTS, "ts_us", -1),
        (Topic.REQUESTS, "pair_id", "x" * 10_000),
        (Topic.REQUESTS, "node", ""),
        (Topic.REQUESTS, "embedding", (float("nan"),)),
        (Topic.LOGITS, "duration_us", -1),
        (Topic.LOGITS, "signature", "no hash"),
        (Topic.LOGITS, "definition", "cooked"),
        (Topic.LOGITS, "top_logprobs", ()),
    ],
)
async def test_an_impossible_event_is_counted_and_reported(
    topic: Topic, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = f"agents.gateway.recording.{'request' if topic is Topic.REQUESTS else 'logit'}_event"
    module, _, name = made.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)

    def impossible(*arguments: Any) -> Any:
        event = real(*arguments)
        if event.arm == "canary":
            event = type(event)(
                **{**{one: getattr(event, one) for one in event.__struct_fields__}, field: value}
            )
        return event

    monkeypatch.setattr(made, impossible)
    engines = [Engine("baseline", as_asked()), Engine("canary", as_asked())]
    mirror = MirrorSettings(rate=1.0, tokens_per_s=10_000_000, per_signature_per_minute=1000)
    async with running(engines, mirror=mirror, publishing={"read_back": False}) as it:
        for _ in range(3):
            assert (await it.ask())[0] == 200
        await until(lambda: it.publisher.stats().dropped.get("invalid", 0) == 3)
        assert await it.publisher.drain(10)
        await it.publisher.close(5)
        assert it.publisher.stats().dropped == {"invalid": 3}
        dropped: dict[str, int] = {}
        for sent in it.producer.sent:
            decode = codec.decode_requests if sent.topic == Topic.REQUESTS.value else codec.decode_logits
            decoded = decode(sent.value, sent.headers["content-type"].decode())
            assert decoded.rejected == ()
            if sent.topic == topic.value:
                for key, count in decoded.header.dropped.items():
                    dropped[key] = dropped.get(key, 0) + count
        assert dropped == {"r/canary": 3}


async def test_what_a_gateway_makes_is_readable() -> None:
    engines = [Engine("baseline", as_asked()), Engine("canary", as_asked())]
    mirror = MirrorSettings(rate=1.0, tokens_per_s=10_000_000)
    async with running(engines, mirror=mirror, publishing={"read_back": False}) as it:
        assert (await it.ask())[0] == 200
        assert await it.publisher.drain(10)
        assert it.publisher.events
        assert all(map(is_readable, it.publisher.events))
