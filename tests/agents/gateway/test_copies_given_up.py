"""A copy that cannot be compared any more is hung up on: reading it would cost users time."""

from __future__ import annotations

from agents.gateway.shadowing import EVENT_BYTES
from tests.agents.gateway.harness import DONE, ROLE, Engine, chunk, running, streaming, until

PARTS = 400


async def test_a_copy_of_huge_events_is_hung_up_on() -> None:
    huge = b": " + b"x" * EVENT_BYTES + b"\n\n"
    canary = Engine("canary", streaming([ROLE, chunk("The"), *[huge] * PARTS, DONE]))
    async with running([Engine("baseline", streaming()), canary]) as one:
        assert (await one.ask())[0] == 200
        await until(lambda: len(one.requests()) == 2)
        (copy,) = [event for event in one.requests() if event.shadow]
        assert copy.error == "garbled"
        assert [event.arm for event in one.logits()] == ["baseline"]
        await until(lambda: canary.under_way == 0)
        assert canary.cancelled == 1, "it was not read to its end"


async def test_a_copy_of_events_just_under_it_is_read() -> None:
    large = b": " + b"x" * (EVENT_BYTES - 10) + b"\n\n"
    canary = Engine(
        "canary", streaming([ROLE, *[chunk("The")] * 3, large, chunk(None, finish_reason="stop"), DONE])
    )
    async with running([Engine("baseline", streaming()), canary]) as one:
        assert (await one.ask())[0] == 200
        await until(lambda: len(one.logits()) == 2)
        assert [event.error for event in one.requests()] == [None, None]
        assert canary.cancelled == 0
