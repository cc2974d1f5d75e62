"""Which requests are mirrored: an even sample, whole pairs, no prompt too often, never over the budget."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.mirroring import SIGNATURES_MOST, USED_MOST, Mirroring, NotMirrored, Reason
from agents.gateway.routing import Routing
from agents.gateway.settings import (
    CHAT,
    COMPLETIONS,
    EngineSettings,
    MirrorPaths,
    MirrorSettings,
    PoolSettings,
)
from agents.router.core import Effective
from schemas.events import ARMS, Arm

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
OTHERS: dict[Arm, tuple[Arm, ...]] = {
    arm: tuple(one for one in ARMS if one != arm) for arm in ("baseline", "canary", "control")
}
PLENTY = 10_000_000


def mirroring(**settings: object) -> Mirroring:
    return Mirroring(MirrorSettings(**{"rate": 1.0, "tokens_per_s": PLENTY, **settings}))  # type: ignore[arg-type]


def decide(
    by: Mirroring,
    pair_id: str = "p",
    *,
    signature: str = "s",
    path: str = CHAT,
    arm: Arm = "baseline",
    possible: Sequence[Arm] | None = None,
    tokens: int = 0,
    at_us: int = 0,
) -> tuple[Arm, ...] | NotMirrored:
    others = OTHERS[arm] if possible is None else possible
    return by.decide(pair_id, signature, path, arm, others, tokens, at_us)


def test_who_is_compared_with_whom() -> None:
    """X3: canary minus control per prompt needs all three; canary against baseline both of theirs."""
    told: dict[tuple[Arm, tuple[Arm, ...]], tuple[Arm, ...] | NotMirrored] = {}
    none = NotMirrored(Reason.NO_PAIR)
    expected: dict[tuple[Arm, tuple[Arm, ...]], tuple[Arm, ...] | NotMirrored] = {
        ("baseline", ("canary", "control")): ("canary", "control"),
        ("baseline", ("control", "canary")): ("canary", "control"),
        ("baseline", ("canary",)): ("canary",),
        ("baseline", ("control",)): none,
        ("baseline", ()): none,
        ("baseline", ("baseline", "canary")): ("canary",),
        ("canary", ("baseline", "control")): ("baseline", "control"),
        ("canary", ("baseline",)): ("baseline",),
        ("canary", ("control",)): none,
        ("canary", ()): none,
        ("control", ("baseline", "canary")): ("baseline", "canary"),
        ("control", ("baseline",)): none,
    }
    for arm, possible in expected:
        told[arm, possible] = decide(mirroring(), arm=arm, possible=possible)
    assert told == expected


@pytest.mark.parametrize(
    ("arms", "baseline", "canary"),
    [
        (("baseline", "canary"), ("canary",), ("baseline",)),
        (("canary", "control"), ("canary", "control"), None),
        (("baseline",), None, ("baseline",)),
        (("control",), None, None),
        ((), None, None),
    ],
)
def test_arms_that_may_not_be_sent_copies(
    arms: tuple[Arm, ...], baseline: tuple[Arm, ...] | None, canary: tuple[Arm, ...] | None
) -> None:
    for arm, found in (("baseline", baseline), ("canary", canary)):
        told = decide(mirroring(arms=arms), arm=arm)  # type: ignore[arg-type]
        assert told == (NotMirrored(Reason.NO_PAIR) if found is None else found)


def test_paths_are_switched_one_by_one() -> None:
    by = mirroring(paths=MirrorPaths(chat=False))
    assert decide(by, path=CHAT) == NotMirrored(Reason.PATH)
    assert decide(by, path=COMPLETIONS) == ("canary", "control")
    for path in ("/v1/models", "/slots", "", "/v1/chat/completions/"):
        assert decide(by, path=path) == NotMirrored(Reason.PATH)


def place(pair_id: str) -> float:
    """0..1, independently."""
    return int(hashlib.sha256(b"klaxon/mirror\x00" + pair_id.encode()).hexdigest()[:16], 16) / 2**64


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.05, 0.5, 1.0])
def test_the_sample_is_a_hash_of_the_pair_alone(rate: float) -> None:
    one, other = mirroring(rate=rate), mirroring(rate=rate)
    ids = [f"pair-{at}" for at in range(4_000)]
    found = {pair for pair in ids if decide(one, pair, signature=pair) == OTHERS["baseline"]}
    assert found == {pair for pair in ids if place(pair) < rate}
    again = {pair for pair in reversed(ids) if other.sampled(pair)}
    assert found == again
    assert abs(len(found) - 4_000 * rate) <= 5 * math.sqrt(4_000 * rate * (1 - rate))


def test_the_sample_is_independent_of_the_route() -> None:
    """A request's id may be its routing key, too: a hash in common would mirror the canary's and no other."""
    pools = [
        PoolSettings(arm=arm, kind="vllm", model_version=arm, engines=(EngineSettings(node=arm, url=f"http://{arm}"),))
        for arm in ARMS[:2]
    ]  # fmt: skip
    routing = Routing(pools, "chat")  # type: ignore[arg-type]
    routing.obey(Effective({"baseline": 75.0, "canary": 25.0}, (), True, False), 1)
    by = mirroring(rate=0.25)
    both = sum(
        routing.route(f"{at}".encode(), None, lambda _: 0).arm == "canary" and by.sampled(f"{at}")  # type: ignore[union-attr]
        for at in range(8_000)
    )
    assert abs(both - 500) < 5 * math.sqrt(8_000 / 16 * 15 / 16)


@pytest.mark.parametrize("most", [1, 4, 1_000])
def test_equal_prompts_are_capped_in_any_minute(most: int) -> None:
    by = mirroring(per_signature_per_minute=most)
    told = [decide(by, f"{at}", at_us=at) for at in range(most + 2)]
    assert told == [("canary", "control")] * most + [NotMirrored(Reason.SIGNATURE_CAP)] * 2
    assert decide(by, "other", signature="t", at_us=most) == ("canary", "control")
    assert decide(by, "early", at_us=MINUTE_US - 1) == NotMirrored(Reason.SIGNATURE_CAP)
    assert decide(by, "then", at_us=MINUTE_US) == ("canary", "control")
    assert decide(by, "again", at_us=MINUTE_US) == NotMirrored(Reason.SIGNATURE_CAP)
    later = ("canary", "control") if most > 1 else NotMirrored(Reason.SIGNATURE_CAP)
    assert decide(by, "again", at_us=MINUTE_US + 1) == later


@given(
    st.lists(st.tuples(st.integers(0, 30 * SECOND_US), st.sampled_from("abc")), max_size=60),
    st.integers(1, 4),
)
def test_no_minute_holds_more_than_the_cap(steps: list[tuple[int, str]], most: int) -> None:
    """By looking back at every mirrored request; and none is refused that has room."""
    by = mirroring(per_signature_per_minute=most)
    mirrored: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    now_us = 0
    for wait_us, signature in steps:
        now_us += wait_us
        lately = [at for at in mirrored[signature] if now_us - at < MINUTE_US]
        told = decide(by, signature=signature, at_us=now_us)
        assert (told == ("canary", "control")) == (len(lately) < most)
        if told == ("canary", "control"):
            mirrored[signature].append(now_us)
    remembered = sum(any(now_us - at < MINUTE_US for at in times) for times in mirrored.values())
    assert remembered <= by.gauges()["mirror_signatures"] <= 3


def test_signatures_are_bounded_and_forgotten_after_a_minute() -> None:
    by = mirroring(per_signature_per_minute=1)
    for at in range(SIGNATURES_MOST + 10):
        decide(by, signature=f"s{at}", at_us=0)
    gauges = by.gauges()
    assert (gauges["mirror_signatures"], gauges["mirror_signatures_forgotten"]) == (SIGNATURES_MOST, 10)
    assert decide(by, signature="s9", at_us=1) == ("canary", "control"), "the oldest were forgotten"
    assert decide(by, signature="s11", at_us=1) == NotMirrored(Reason.SIGNATURE_CAP)
    assert decide(by, signature="new", at_us=MINUTE_US) == ("canary", "control")
    assert by.gauges()["mirror_signatures"] == 2, "those of the first moment are gone"


def test_of_too_many_signatures_the_one_mirrored_longest_ago_is_forgotten() -> None:
    by = mirroring(per_signature_per_minute=2)
    for at in range(SIGNATURES_MOST):
        decide(by, signature=f"s{at}")
    assert decide(by, signature="s0", at_us=1) == ("canary", "control")
    assert decide(by, signature="one more", at_us=2) == ("canary", "control")
    assert decide(by, signature="s0", at_us=3) == NotMirrored(Reason.SIGNATURE_CAP)
    assert [decide(by, signature="s1", at_us=3) for _ in range(2)] == [("canary", "control")] * 2
    assert by.gauges()["mirror_signatures_forgotten"] == 2


def test_a_request_that_is_not_mirrored_counts_under_no_cap() -> None:
    by = mirroring(per_signature_per_minute=1, tokens_per_s=1)
    assert decide(by, tokens=5, signature="t") == ("canary", "control")
    assert decide(by) == NotMirrored(Reason.BUDGET)
    assert decide(by, at_us=9 * SECOND_US) == NotMirrored(Reason.BUDGET)
    assert by.gauges()["mirror_signatures"] == 1
    assert decide(by, at_us=9 * SECOND_US + 1) == ("canary", "control")


def test_the_budget_at_just_under_and_just_over() -> None:
    """1,000 tokens a second, a second's at once; two copies of each request."""
    by = mirroring(tokens_per_s=1_000)
    assert by.gauges()["mirror_tokens_left"] == 1_000
    assert decide(by, signature="a", tokens=499) == ("canary", "control")
    assert by.gauges()["mirror_tokens_left"] == 2
    assert decide(by, signature="b", tokens=1) == ("canary", "control")
    assert decide(by, signature="c", tokens=1) == NotMirrored(Reason.BUDGET)
    assert decide(by, signature="c", tokens=10_000, at_us=1) == ("canary", "control"), "one goes over"
    debt_us = 20 * SECOND_US
    assert decide(by, signature="d", at_us=debt_us) == NotMirrored(Reason.BUDGET)
    assert decide(by, signature="d", at_us=debt_us + 1) == ("canary", "control")


def test_what_is_promised_is_settled() -> None:
    by = mirroring(tokens_per_s=1_000)
    decide(by, tokens=400)
    assert by.gauges()["mirror_tokens_left"] == 200
    by.settle(400, 100)
    assert by.gauges()["mirror_tokens_left"] == 500
    by.settle(400, 0)
    assert by.gauges()["mirror_tokens_left"] == 900
    by.settle(0, 2_000)
    assert by.gauges()["mirror_tokens_left"] == -1_100
    by.settle(5_000, 0)
    assert by.gauges()["mirror_tokens_left"] == 1_000, "never more than a second's"


@pytest.mark.parametrize(
    ("used", "left"), [(-5, 1_000), (USED_MOST, 1_000 - USED_MOST), (2**62, 1_000 - USED_MOST)]
)
def test_an_engine_that_counts_wrongly_neither_fills_the_budget_nor_ends_mirroring(
    used: int, left: int
) -> None:
    by = mirroring(tokens_per_s=1_000)
    by.settle(0, used)
    assert by.gauges()["mirror_tokens_left"] == left


STEPS = st.lists(
    st.tuples(st.integers(0, 3 * SECOND_US), st.integers(0, 5_000), st.integers(0, 10_000)), max_size=50
)


@given(STEPS, st.integers(1, 3_000))
def test_never_over_the_budget_by_more_than_one_request(
    steps: list[tuple[int, int, int]], tokens_per_s: int
) -> None:
    """In every span of time: what was used there is a second's, the span's, and one request's at most."""
    by = mirroring(tokens_per_s=tokens_per_s, per_signature_per_minute=1_000)
    now_us, spent = 0, []
    for wait_us, expected, used in steps:
        now_us += wait_us
        if decide(by, tokens=expected, at_us=now_us) == ("canary", "control"):
            by.settle(expected, used)
            by.settle(expected, used)
            spent.append((now_us, 2 * used))
    for first in range(len(spent)):
        for last in range(first, len(spent)):
            whole = sum(tokens for _, tokens in spent[first : last + 1])
            span_us = spent[last][0] - spent[first][0]
            most = max(tokens for _, tokens in spent[first : last + 1])
            assert whole <= tokens_per_s + tokens_per_s * span_us / SECOND_US + most


@given(STEPS, st.integers(1, 3_000))
def test_a_request_waits_for_nothing_but_the_budget(
    steps: list[tuple[int, int, int]], tokens_per_s: int
) -> None:
    """Against a bucket in fractions: refused if and only if it is empty."""
    by = mirroring(tokens_per_s=tokens_per_s, per_signature_per_minute=1_000)
    now_us, left_us = 0, tokens_per_s * SECOND_US
    for wait_us, expected, _ in steps:
        now_us += wait_us
        left_us = min(tokens_per_s * SECOND_US, left_us + wait_us * tokens_per_s)
        told = decide(by, tokens=expected, at_us=now_us)
        assert told == (("canary", "control") if left_us > 0 else NotMirrored(Reason.BUDGET))
        if left_us > 0:
            left_us -= 2 * expected * SECOND_US


def test_a_spent_budget_does_not_make_the_sample_lean_to_short_requests() -> None:
    """Twice as much is offered as fits, every second request long. Against a binomial count, seeded."""
    source = random.Random(7)
    by = mirroring(tokens_per_s=1_000, per_signature_per_minute=1_000)
    now_us, lengths = 0, []
    for at in range(20_000):
        now_us += round(source.expovariate(1) * SECOND_US)
        tokens = source.choice([100, 3_900])
        if decide(by, signature=f"{at}", tokens=tokens // 2, at_us=now_us) == ("canary", "control"):
            lengths.append(tokens)
    assert 4_000 < len(lengths) < 11_000
    assert abs(lengths.count(3_900) - len(lengths) / 2) < 5 * math.sqrt(len(lengths) / 4)


@given(st.lists(st.integers(0, 10 * MINUTE_US), max_size=40))
def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing(times: list[int]) -> None:
    """As if it had stood still."""
    by, still = (mirroring(tokens_per_s=10, per_signature_per_minute=3) for _ in range(2))
    newest = 0
    for at_us in times:
        newest = max(newest, at_us)
        assert decide(by, tokens=7, at_us=at_us) == decide(still, tokens=7, at_us=newest)
        assert by.gauges() == still.gauges()


def test_everything_is_counted_once() -> None:
    by = mirroring(rate=0.5, per_signature_per_minute=1, tokens_per_s=1)
    told = [decide(by, f"p{at}", signature=f"{at % 2}", tokens=1, at_us=at) for at in range(50)]
    told += [decide(by, path="/v1/models"), decide(by, _sampled(by), possible=())]
    reasons = [one.reason for one in told if isinstance(one, NotMirrored)]
    gauges = by.gauges()
    assert {reason: gauges[f"not_mirrored_{reason}"] for reason in Reason} == {
        reason: reasons.count(reason) for reason in Reason
    }
    assert gauges["mirrored"] == len(told) - len(reasons) == 1
    assert set(reasons) == set(Reason)


def _sampled(by: Mirroring) -> str:
    return next(f"p{at}" for at in range(1_000) if by.sampled(f"p{at}"))


def test_reasons_in_their_order() -> None:
    """A request that several keep is counted under the first: what it costs least to find."""
    by = mirroring(rate=0.0, tokens_per_s=1)
    assert decide(by, path="/v1/models", possible=()) == NotMirrored(Reason.PATH)
    assert decide(by, possible=()) == NotMirrored(Reason.NOT_SAMPLED)
    by = mirroring(tokens_per_s=1, per_signature_per_minute=1)
    decide(by, tokens=10)
    assert decide(by, possible=()) == NotMirrored(Reason.NO_PAIR)
    assert decide(by) == NotMirrored(Reason.SIGNATURE_CAP)
    assert decide(by, signature="t") == NotMirrored(Reason.BUDGET)
