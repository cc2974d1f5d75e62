"""A router believes what a trusted key signed: while it reads the log, while it follows it, and once more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from agents.router.runner import Router, RouterSettings
from schemas.control import Directive
from schemas.signing import SIGNATURE, Signer, Trust, TrustedKey, Use, Verdict
from schemas.topics import Topic, gating_partition

GATE = Signer(bytes(range(32)))
OPERATOR = Signer(bytes(range(1, 33)))
STRANGER = Signer(bytes(range(2, 34)))
SECOND = 1_000_000
PLACE = gating_partition("chat")


def directive(epoch: int, canary: float, *, at_s: float = 0, **changes: Any) -> Directive:
    fields: dict[str, Any] = {
        "rollout": "chat", "generation": 1, "epoch": epoch, "ts_us": int(at_s * SECOND),
        "lease_until_us": int((at_s + 15) * SECOND), "dead_man_us": 60 * SECOND, "state": "observing",
        "weights": {"v1": 100.0 - canary, "v2": canary}, "last_promoted": {"v1": 100.0, "v2": 0.0},
        "fallback": "v1",
    }  # fmt: skip
    return Directive(**{**fields, **changes})


@dataclass
class Keys:
    """Trusted keys that a test changes; the gate's ends after `until_s`."""

    until_s: float | None = None
    polled: list[float] = field(default_factory=list)

    def check(
        self, topic: Topic, key: bytes | None, value: bytes | None, header: bytes | None, now_us: int
    ) -> Verdict:
        until_us = None if self.until_s is None else int(self.until_s * SECOND)
        trusted = {
            GATE.key_id: TrustedKey(GATE.public_key, frozenset({Use.DIRECTIVES}), valid_until_us=until_us),
            OPERATOR.key_id: TrustedKey(OPERATOR.public_key, frozenset({Use.COMMANDS})),
        }
        return Trust(trusted).check(topic, key, value, header, now_us)

    def poll(self, now_s: float) -> None:
        self.polled.append(now_s)


@pytest.fixture
def router() -> Router:
    """One that has read the log to its end."""
    made = Router(RouterSettings("nowhere:1", "r"), lambda _: None, trust=Keys())
    made._caught_up = True
    return made


def take(
    router: Router, record: Directive | bytes | None, signer: Signer | None = GATE, *,
    at_s: float = 0, signed: Directive | None = None, read_before: bool = False,
) -> None:  # fmt: skip
    """`signed`: what the signature is really of."""
    value = msgspec.json.encode(record) if isinstance(record, Directive) else record
    over = value if signed is None else msgspec.json.encode(signed)
    header = None if signer is None or over is None else signer.header(Topic.CONTROL, b"chat", over)[1]
    router._take(PLACE, b"chat", value, int(at_s * SECOND), header, read_before=read_before)


def weight(router: Router, at_s: float = 0) -> float | None:
    state = router._states.get("chat")
    return None if state is None else state.effective_weights(int(at_s * SECOND)).get("v2", 0.0)


def refused(router: Router) -> dict[str, int]:
    return {name: count for name, count in router.gauges()["refused/directive"].items() if count}


def test_each_refusal_is_counted_under_its_name_and_moves_nothing(router: Router) -> None:
    first, second = directive(1, 1.0), directive(5, 5.0)
    take(router, first)
    take(router, second)
    assert weight(router) == 5.0
    greedy = directive(6, 90.0, generation=3)
    take(router, greedy, None)
    take(router, greedy, signed=second)
    take(router, greedy, STRANGER)
    take(router, greedy, OPERATOR)
    take(router, first)
    take(router, second)
    take(router, None)
    take(router, b"{")
    take(router, directive(7, 90.0), at_s=20)
    assert weight(router) == 5.0
    assert refused(router) == {
        "unsigned": 1, "wrong_signature": 1, "unknown_key": 1, "not_for_this_use": 1, "replayed": 2,
        "tombstone": 1, "malformed": 1, "expired": 1,
    }  # fmt: skip
    take(router, directive(8, 6.0, at_s=20), at_s=20)
    assert weight(router, 20) == 6.0, "what was refused used no numbers up"


def test_a_forged_tombstone_and_a_forged_trip_move_nothing(router: Router) -> None:
    take(router, directive(5, 5.0))
    take(router, None, None)
    take(router, directive(6, 0.0, state="tripped"), None)
    assert weight(router) == 5.0


def test_a_key_is_believed_until_its_end_and_what_it_said_before_holds(router: Router) -> None:
    router._reading._trust = Keys(until_s=10)
    take(router, directive(1, 1.0), at_s=10)
    take(router, directive(2, 5.0, at_s=10), at_s=10.000_001)
    assert weight(router, 10) == 1.0
    assert refused(router) == {"outside_validity": 1}


@pytest.mark.parametrize("forger", [None, STRANGER, OPERATOR])
def test_of_the_log_only_the_greatest_trusted_one_counts(forger: Signer | None) -> None:
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None, trust=Keys())
    take(router, directive(1, 1.0))
    take(router, directive(2, 0.0, state="tripped"))
    take(router, directive(9, 90.0, generation=7), forger)
    take(router, directive(1, 1.0))
    assert weight(router) is None, "nothing is believed before the end of the log is known"
    for one in router._log.settle().values():
        router._obey(one, 0)
    assert weight(router) == 0.0


def test_what_was_read_before_is_no_replay(router: Router) -> None:
    """After a reconnect the topic is read from its beginning again."""
    take(router, directive(1, 1.0))
    take(router, directive(1, 1.0), read_before=True)
    take(router, directive(1, 1.0), None, read_before=True)
    take(router, directive(2, 5.0), read_before=True)
    assert weight(router) == 5.0
    assert refused(router) == {}


def test_without_required_signatures_everything_is_believed() -> None:
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None)
    take(router, directive(1, 1.0), None)
    take(router, directive(2, 5.0), STRANGER)
    assert weight(router) == 5.0
    assert refused(router) == {}


def test_what_was_refused_before_is_not_counted_again(router: Router) -> None:
    """It stands on the topic for hours; an alert is about what is written now."""
    take(router, directive(1, 1.0))
    for read_before in (False, True, True):
        take(router, directive(9, 90.0), None, read_before=read_before)
        take(router, directive(9, 90.0), STRANGER, read_before=read_before)
        take(router, None, read_before=read_before)
        take(router, b"{", read_before=read_before)
        assert weight(router) == 1.0
        assert refused(router) == {"unsigned": 1, "unknown_key": 1, "tombstone": 1, "malformed": 1}


async def test_changed_keys_are_looked_for_whatever_the_broker_does() -> None:
    keys, stop = Keys(), asyncio.Event()
    router = Router(RouterSettings("127.0.0.1:1", "r", retry_max_s=0.5), lambda _: None, trust=keys)
    task = asyncio.create_task(router.run(stop))
    while not keys.polled:  # noqa: ASYNC110 (nothing announces it)
        await asyncio.sleep(0.01)
    stop.set()
    await task


def test_the_header_is_the_last_one_of_its_name(router: Router) -> None:
    """As everywhere else: a record with two does not mean one thing here and another there."""
    value = msgspec.json.encode(directive(1, 1.0))
    good = GATE.header(Topic.CONTROL, b"chat", value)

    class Read:
        partition, offset, key = PLACE, 3, b"chat"
        headers = ((SIGNATURE, b"x:y"), good)

    record: Any = Read()
    record.value = value
    router._take_record(record, 0)
    assert weight(router) == 1.0
    assert router._read_to == {PLACE: 4}
