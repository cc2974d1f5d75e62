"""The greatest believed directive is found whatever stands beside it, and few are verified for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import control_log
from schemas.control import Directive
from schemas.control_log import GreatestBelieved, Stated, numbers


def stated(
    epoch: int,
    *,
    generation: int = 1,
    rollout: str = "a",
    header: bytes | None = b"good",
    value: bytes = b"",
) -> Stated:
    directive = Directive(
        rollout=rollout, generation=generation, epoch=epoch, ts_us=0, lease_until_us=0, dead_man_us=0,
        state="observing", weights={"v1": 100.0}, last_promoted={"v1": 100.0}, fallback="v1",
    )  # fmt: skip
    return Stated(directive, value, header)


class Verifier:
    def __init__(self) -> None:
        self.verified = 0

    def believes(self, one: Stated) -> bool:
        self.verified += 1
        return one.header == b"good"


LOGS = st.lists(
    st.builds(
        stated,
        epoch=st.integers(0, 5),
        generation=st.integers(1, 2),
        rollout=st.sampled_from("ab"),
        header=st.sampled_from([b"good", b"bad", None]),
    )
)


@given(LOGS, st.integers(1, 5))
def test_it_is_what_verifying_every_record_finds(log: list[Stated], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_log, "MOST_PENDING", most)
        greatest = GreatestBelieved(Verifier().believes)
        for one in log:
            greatest.offer(one)
        found = greatest.settle()
    wanted: dict[str, Directive] = {}
    for one in log:
        before = wanted.get(one.directive.rollout)
        if one.header == b"good" and (before is None or numbers(before) < numbers(one.directive)):
            wanted[one.directive.rollout] = one.directive
    assert found == wanted
    assert all(found[name] is directive for name, directive in wanted.items()), "the first among equals"


def test_a_long_log_costs_few_verifications_and_a_bounded_memory() -> None:
    verifier = Verifier()
    greatest = GreatestBelieved(verifier.believes)
    for epoch in range(100_000):
        greatest.offer(stated(epoch))
        assert greatest._count < control_log.MOST_PENDING
    assert greatest.settle()["a"].epoch == 99_999
    assert verifier.verified <= 100_000 // control_log.MOST_PENDING + 1


def test_large_records_of_strangers_do_not_pile_up() -> None:
    greatest = GreatestBelieved(Verifier().believes)
    padded = b" " * 900_000
    for epoch in range(200):
        greatest.offer(stated(epoch, header=None, value=padded))
        held = sum(len(one.value) for pending in greatest._pending.values() for one in pending)
        assert held < control_log.MOST_PENDING_BYTES
    assert greatest.settle() == {}
