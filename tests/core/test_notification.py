"""Notifications: what is told, how it is signed, what an answer means, which address may be used."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.notification import (
    RETRY_LONGEST_S,
    Notification,
    NotificationError,
    checked_url,
    headers,
    judged,
    notification_of,
    secret_of,
    wait_s,
)
from tests.core.gate.build import T0, Bench, decisions, healthy_pairs

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE = Notification(id="msg_p5jXN8AQM9LWM0D4loKWxJek", body=b'{"test": 2432232314}')


def test_the_signature_is_that_of_the_specifications_example() -> None:
    made = headers(MESSAGE, 1_614_265_330, [secret_of(SECRET)])
    assert made == {
        "content-type": "application/json",
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_two_secrets_make_two_signatures() -> None:
    old, new = secret_of(SECRET), secret_of("whsec_" + base64.b64encode(b"x" * 24).decode())
    both = headers(MESSAGE, 7, [old, new])["webhook-signature"].split(" ")
    assert both == [headers(MESSAGE, 7, [key])["webhook-signature"] for key in (old, new)]
    assert len(set(both)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "begins with whsec_"),
        ("whsec_!!!", "base64"),
        ("whsec_" + base64.b64encode(b"short").decode(), "at least 24 bytes; this one 5"),
    ],
)
def test_secrets_that_are_refused_are_not_quoted(text: str, words: str) -> None:
    with pytest.raises(NotificationError, match=words) as raised:
        secret_of(text)
    assert text.removeprefix("whsec_") not in str(raised.value)


def tripped() -> dict[str, Any]:
    bench = Bench.started()
    bench.run(T0, T0 + 20, healthy_pairs(50, 0.3))
    (trip,) = [one for one in decisions(bench.effects) if one.kind == "trip"]
    message = notification_of(trip, "chat", "klaxon.decisions/2/145", {"trip", "gap"})
    assert message is not None
    assert message.id == "klaxon.decisions/2/145"
    said: dict[str, Any] = json.loads(message.body)
    return said


def test_a_trip_says_what_happened_where_and_why() -> None:
    said = tripped()
    assert said["type"] == "klaxon.trip"
    data = said["data"]
    assert (data["rollout"], data["state"], data["weights"]) == ("chat", "tripped", {"v1": 100.0, "v2": 0.0})
    assert (data["generation"], data["where"]) == (1, "klaxon.decisions/2/145")
    assert data["cause"]["rule"] == "G3-divergence"
    assert data["reason"].startswith("rollback_l1: G3-divergence")


def test_only_the_kinds_that_are_asked_for() -> None:
    bench = Bench.started()
    (started,) = decisions(bench.effects)
    assert notification_of(started, "chat", "x", {"trip", "gap"}) is None
    assert notification_of(started, "chat", "x", {"command"}) is not None


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (199, "again"), (200, "delivered"), (204, "delivered"), (299, "delivered"), (300, "again"),
        (302, "again"), (307, "again"), (400, "refused"), (401, "again"), (403, "again"), (404, "again"),
        (408, "again"),
        (410, "again"), (413, "refused"), (422, "refused"), (429, "again"), (500, "again"), (503, "again"),
    ],
)  # fmt: skip
def test_what_a_status_means(status: int, meaning: str) -> None:
    assert judged(status) == meaning


@given(st.integers(0, 10_000), st.one_of(st.none(), st.floats(0, 1e9)), st.floats(0, 1))
def test_waiting_grows_and_is_bounded(attempt: int, asked: float | None, jitter: float) -> None:
    wait = wait_s(attempt, asked, jitter)
    assert 0.75 <= wait <= RETRY_LONGEST_S
    assert wait >= min(asked or 0.0, RETRY_LONGEST_S)
    assert wait_s(attempt + 1, asked, jitter) >= wait


@pytest.mark.parametrize(
    "url", ["https://h.example/x", "http://127.0.0.1:8/x", "http://localhost/", "http://[::1]:8/x"]
)
def test_addresses_that_may_be_used(url: str) -> None:
    assert checked_url(url, allow_http=False) == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h.example/secret-path", "http to h.example can be read"),
        ("http://127.evil.example/x", "http to 127.evil.example"),
        ("ftp://h.example/x", "no address"),
        ("https://", "no address"),
        ("h.example", "no address"),
        ("https://h:99999999/", "no address"),
        ("https://h..example/secret-path", "no address"),
        (f"https://{'h' * 64}.example/secret-path", "no address"),
    ],
)
def test_addresses_that_may_not(url: str, words: str) -> None:
    with pytest.raises(NotificationError, match=words) as raised:
        checked_url(url, allow_http=False)
    assert "secret-path" not in str(raised.value)
    if words.startswith("http to"):
        assert checked_url(url, allow_http=True) == url
