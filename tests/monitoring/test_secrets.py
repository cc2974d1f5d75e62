"""Secrets in everything that a user can fill, and none of them in a log, a metric or a dead letter."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.monitoring.metrics import WORKERS
from schemas.topics import COLUMNS, Topic
from tests.kafka.broker import Broker
from tests.kafka.records import Written, dump, now_us, producer
from tests.kafka.waiting import eventually
from tests.monitoring.firings import answered, moment, total
from tests.monitoring.installation import everything, until_ready
from tests.monitoring.scraping import address_of
from tests.workers.events import answer, encoded, request, start_command
from tests.workers.fleet import SEAT, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

CANARY = "sk-4711-canary"


def secret(place: str) -> str:
    """One per place, so that a leak names itself."""
    return f"{CANARY}-{place}"


LABELS = (
    "rollout", "node", "model_name", "model_version", "prompt_version", "data_version", "system_version",
    "request_type", "engine", "hardware", "region", "tenant",
)  # fmt: skip
TEXTS = (*LABELS, "error", "finish_reason", "session", "prompt_id", "consent_id", "snapshot_id", "pair_id")


def requests() -> list[bytes]:
    """Records of `klaxon.requests`: good ones, and bad in each field."""
    good = request(now_us(), **{name: secret(name) for name in TEXTS})
    good["scores"] = {secret("score"): 0.5}
    good["steps"] = [{"name": secret("step"), "duration_us": 1, "attempts": 1, "outcome": secret("outcome")}]
    good["text"] = {"key_id": secret("key_id"), "nonce": "AAAA", "data": "AAAA"}
    good[secret("unknown-field")] = {secret("unknown-key"): secret("unknown-value")}
    wrong: dict[str, Any] = {
        "arm": secret("arm"),
        "status": secret("status"),
        "signature": secret("signature"),
        "ts_us": secret("ts_us"),
        "ttft_us": [secret("ttft_us")],
        "scores": {secret("score-name"): secret("score-value")},
        "steps": [{secret("step-key"): secret("step-value")}],
        "node": secret("long") * 100,
    }
    text = json.dumps(good)
    return [
        encoded(good),
        *(encoded({**good, name: value}) for name, value in wrong.items()),
        encoded([good, {**good, "arm": secret("batch-arm")}]),
        encoded({**good, "rollout": "r1"}),
        text[:-1].encode(),
        f'{{"{secret("malformed")}'.encode(),
        secret("no-json").encode(),
        f'[{text}, {{"{secret("nan-key")}": NaN, "rollout": "{secret("nan")}"}}]'.encode(),
        f'{{"{secret("infinity-key")}": {{"{secret("inner")}": Infinity}}}}'.encode(),
        f'"{secret("string")}"'.encode(),
        b"\xff" + secret("utf-8").encode(),
    ]


def logits() -> list[bytes]:
    """Records of `klaxon.logits`."""
    good = answer(now_us(), "canary", secret("pair"), **{name: secret(name) for name in LABELS})
    wrong: dict[str, Any] = {
        "definition": secret("definition"),
        "source": secret("source"),
        "expected_arms": [secret("expected")],
        "tokens": [secret("token")],
        "top_logprobs": [[secret("logprob")]],
        "token_bytes": [secret("token-bytes")],
        "precision": secret("precision"),
    }
    return [encoded(good), *(encoded({**good, name: value}) for name, value in wrong.items())]


def telemetry() -> list[bytes]:
    """Records of `klaxon.telemetry`."""
    good = {
        "v": 1,
        "node": secret("node"),
        "ts_us": now_us(),
        "fingerprint": {"weights": secret("weights"), "libraries": {secret("library"): secret("version")}},
        "engine": {"name": secret("engine")},
    }
    bad = {**good, "fragmentation": {"method": secret("method"), secret("key"): 1}}
    return [encoded(good), encoded(bad), encoded({**good, "gpus": secret("gpus")})]


def commands() -> list[bytes]:
    """Records of `klaxon.commands`: broken, refused, and one whose policy and spec are wrong."""
    start = start_command(secret("command_id"))
    spec = {**start["arguments"]["spec"], "rollout": "r1", "labels": {secret("label"): secret("label-value")}}
    return [
        encoded({**start, "command": secret("command")}),
        encoded({**start, "by": secret("by"), "arguments": {"spec": {**spec, secret("spec-key"): 1}}}),
        encoded(
            {
                **start,
                "command_id": secret("2"),
                "arguments": {"spec": {**spec, "fallback": secret("fallback")}},
            }
        ),
        encoded(
            {
                **start,
                "command_id": secret("3"),
                "command": "policy",
                "arguments": {"policy": secret("policy") + ": ["},
            }
        ),
        encoded(
            {
                **start,
                "command_id": secret("4"),
                "command": "policy",
                "arguments": {secret("argument"): secret("value")},
            }
        ),
        encoded({**start, "command_id": secret("5"), "command": "pause", "expects": secret("expects")}),
        secret("command-text").encode(),
    ]


def written() -> list[Written]:
    """Everything, with secrets as keys and content types, too."""
    found = [
        Written(topic, value, key=secret("record-key").encode(), partition=at % 2)
        for topic, values in (
            (Topic.REQUESTS, requests()),
            (Topic.LOGITS, logits()),
            (Topic.TELEMETRY, telemetry()),
        )
        for at, value in enumerate(values)
    ]
    event = encoded(request(now_us(), prompt_id=secret("prompt_id")))
    found += [
        Written(Topic.REQUESTS, event, partition=0, content_type=f"text/{secret('content-type')}"),
        Written(Topic.REQUESTS, secret("columns").encode(), partition=0, content_type=COLUMNS),
        Written(Topic.LOGITS, secret("columns").encode(), partition=1, content_type=COLUMNS),
        *(
            Written(topic, secret(topic).encode(), partition=SEAT)
            for topic in (Topic.BUCKETS, Topic.PARTIALS)
        ),
        Written(Topic.PAIRS, secret("pairs").encode(), partition=0),
        *(Written(Topic.COMMANDS, value, key=b"r1", partition=SEAT) for value in commands()),
        Written(
            Topic.CONTROL, secret("directive").encode(), key=secret("control-key").encode(), partition=SEAT
        ),
        Written(
            Topic.CONTROL, json.dumps({"rollout": secret("foreign")}).encode(), key=b"r1", partition=SEAT
        ),
    ]
    return found


def leaks(text: str) -> list[str]:
    """The secrets in it, plain, as base64 or as hex digits."""
    spelled = {CANARY: CANARY, CANARY.encode().hex(): "hex"}
    spelled |= {
        base64.b64encode(b"x" * pad + CANARY.encode() + b"xx").decode()[4:16]: f"base64 {pad}"
        for pad in range(3)
    }
    return [
        f"{name}: {line[max(0, line.find(spelling) - 80) : line.find(spelling) + 60]}"
        for line in text.splitlines()
        for spelling, name in spelled.items()
        if spelling in line
    ]


async def test_no_secret_is_in_a_log_a_metric_or_a_dead_letter(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    environment = {
        "KLAXON_LOGGING_FORMAT": "json",
        "KLAXON_CLICKHOUSE_PASSWORD": secret("password"),
    }
    records = written()
    async with everything(kafka, log_folder, tmp_path, environment) as running:
        at = {kind: await address_of(worker) for kind, worker in running.items()}
        for address in at.values():
            await until_ready(address)
        await start_rollout(kafka)
        async with producer(kafka) as client:
            for record in records:
                content_type = (record.content_type or "").encode()
                headers = [
                    ("content-type", content_type),
                    (secret("header"), secret("header-value").encode()),
                ]
                await client.send(record.topic, record.value, record.key, record.partition, headers=headers)
            await client.flush()

        async def settled() -> bool:
            letters = await dump(kafka, Topic.DEAD_LETTER)
            refused = total(await moment(at), "gate", "klaxon_refused_total") or 0
            told = all(": gauges " in running[kind].log for kind in WORKERS)
            return len(letters) >= LETTERS and refused >= 3 and told

        await eventually(settled)
        await asyncio.sleep(2)  # what else they say, they say by now
        metrics = {kind: text or "" for kind, text in (await answered(at)).items()}
        assert [kind for kind, worker in running.items() if not worker.running] == []
        for worker in running.values():
            await worker.stop()
        logs = {kind: worker.log for kind, worker in running.items()}
        letters = await dump(kafka, Topic.DEAD_LETTER)
    for kind in running:
        assert leaks(logs[kind]) == [], kind
        assert leaks(metrics[kind]) == [], kind
        assert "withheld" not in logs[kind], f"{kind} logs a bare string: {logs[kind]}"
    for letter in letters:
        said = f"{letter.key!r} {letter.value!r} {letter.headers!r}"
        assert leaks(said) == [], said
    lines = [json.loads(line) for log in logs.values() for line in log.splitlines() if line[:1] == "{"]
    assert {line.get("process", "router") for line in lines} == set(running)
    assert any("gauges" in line.get("event", "") and "process" in line["arguments"][1] for line in lines)


LETTERS = 30
"""Of the records above at least so many are refused."""


def test_known_bad_leaks_are_found_however_they_are_spelled() -> None:
    for text in (secret("x"), secret("x").encode().hex(), base64.b64encode(secret("x").encode()).decode()):
        assert leaks(f"a line with {text}\n"), text
    assert leaks("nothing here") == []
