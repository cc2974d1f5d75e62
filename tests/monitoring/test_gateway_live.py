"""A running gateway: what it exposes is what is declared, and means what was done."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import get_args

import pytest

from agents.gateway.consent import Refusal
from agents.gateway.counts import Mirror, Note, Request
from agents.gateway.events import NoLogits
from agents.gateway.mirroring import Reason
from agents.gateway.routing import Why
from agents.publish import DropReason
from agents.router.runner import Router, RouterSettings
from pipeline.cli.monitored import monitored
from pipeline.config import MonitoringConfig
from pipeline.monitoring.exposition import thing_of
from pipeline.monitoring.metrics import CLOSED, OTHER, Thing, metrics_of
from tests.agents.gateway.harness import Engine, running, saying, streaming, until
from tests.monitoring.firings import answered
from tests.monitoring.scraping import families_of, samples_of

SOMETIMES = {"klaxon_router_directive_age_seconds"} | {
    f"klaxon_gateway_{kind}_key_valid_seconds" for kind in ("signature", "pseudonym", "text")
}
"""Absent before the first directive; of keys that come from no file."""


async def test_what_a_gateway_exposes_is_what_is_declared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "klaxon.monitoring")
    router = Router(RouterSettings("127.0.0.1:9", "g"), lambda _: None)
    engines = [
        Engine("baseline", streaming()),
        Engine("canary", saying(500, b"")),
        Engine("control", streaming()),
    ]
    async with running(engines) as it:

        def gauges() -> dict[str, Mapping[str, int]]:
            return {**it.gateway.gauges(), **router.gauges()}

        config = MonitoringConfig(gateway_port=0)
        async with monitored("gateway", config, gauges=gauges, missing=tuple):
            await it.ask()
            async with it.client.get(it.url + "/slots") as answer:
                assert answer.status == 404
            await until(lambda: len(it.requests()) == 3)
            assert await it.publisher.drain(10)
            await until(lambda: "metrics at" in caplog.text)
            url = caplog.text.rpartition("metrics at ")[2].split()[0].removesuffix("/metrics")
            text = (await answered({"gateway": url}))["gateway"] or ""
            said = gauges()
    families = families_of(text)
    declared = metrics_of("gateway")
    assert {name: each.type for name, each in families.items()} == {one.name: one.kind for one in declared}
    for metric in declared:
        samples = families[metric.name].samples
        assert samples or metric.name in SOMETIMES, f"{metric.name} has no value"
        for sample in samples:
            assert set(sample.labels) == set(metric.labels), sample
            for name in ("outcome", "reason", "kind"):
                if name in sample.labels:
                    assert sample.labels[name] in CLOSED[metric.thing]
                    assert sample.labels[name] != OTHER
    known = {(metric.thing, metric.gauge) for metric in declared}
    for key, names in said.items():
        thing, _ = thing_of(key)
        for name in names:
            assert (thing, name) in known or name in CLOSED.get(thing, ()), f"{key} {name}"

    def total(name: str, **labels: str) -> float:
        return sum(value for found, value in samples_of(text, name) if labels.items() <= found.items())

    assert total("klaxon_gateway_requests_total", outcome="answered") == 1
    assert total("klaxon_gateway_requests_total", outcome="not_found") == 1
    assert total("klaxon_gateway_mirrors_total", outcome="mirrored") == 1
    assert total("klaxon_gateway_mirrors_total", outcome="failed") == 1
    assert total("klaxon_gateway_mirrors_total", outcome="answered") == 1
    assert total("klaxon_gateway_routed_total", reason="weights") == 1
    assert total("klaxon_gateway_events_acknowledged_total") == total("klaxon_gateway_events_total") == 5


def test_the_closed_lists_are_what_is_counted() -> None:
    """In the gateway they are enums; here they stand for everybody to read."""
    counted = {
        Thing.USERS_REQUESTS: Request,
        Thing.REQUEST_NOTES: Note,
        Thing.MIRRORS: Mirror,
        Thing.NO_LOGITS: NoLogits,
        Thing.NOT_MIRRORED: Reason,
        Thing.ROUTED: Why,
    }
    for thing, names in counted.items():
        assert set(CLOSED[thing]) == {name.value for name in names}, thing
    assert set(CLOSED[Thing.UNPUBLISHED]) == set(get_args(DropReason))
    assert set(CLOSED[Thing.TEXTS]) >= {refusal.value for refusal in Refusal}
