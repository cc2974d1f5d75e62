"""Alert rules on what real processes exposed: which test fires which alert; how scrapes become series.

Values are real, time is not: a scrape stands for as long as the rule wants to see it (`for` and a minute), so
nobody waits a quarter of an hour. A process that does not answer is `up` 0, and its series end, as Prometheus
has it. Only the metrics that the rule asks for are handed to promtool.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.kafka.waiting import eventually
from tests.monitoring.scraping import get
from tests.prometheus.promtool import RULES, Case, check_alerts

FIRED_BY: Final[Mapping[str, str]] = {
    "KlaxonEvidenceSilent": "test_nobody_sends_and_a_transaction_hangs",
    "KlaxonTelemetrySilent": "test_nobody_sends_and_a_transaction_hangs",
    "KlaxonLagging": "test_nobody_sends_and_a_transaction_hangs",
    "KlaxonArchiveBehind": "test_an_archive_whose_clickhouse_is_away",
    "KlaxonRetentionAtRisk": "test_an_archive_whose_clickhouse_is_away",
    "KlaxonRecordsDeleted": "test_an_archive_whose_clickhouse_is_away",
    "KlaxonCoverageLow": "test_a_stack_brought_through_faults",
    "KlaxonUnknownSeconds": "test_a_stack_brought_through_faults",
    "KlaxonDeadLetters": "test_a_stack_brought_through_faults",
    "KlaxonLateEvents": "test_a_stack_brought_through_faults",
    "KlaxonCellsCapped": "test_a_stack_brought_through_faults",
    "KlaxonSettingsDiffer": "test_a_stack_brought_through_faults",
    "KlaxonFinalsConflict": "test_a_stack_brought_through_faults",
    "KlaxonTripped": "test_a_stack_brought_through_faults",
    "KlaxonRolloutPaused": "test_a_stack_brought_through_faults",
    "KlaxonGateBlind": "test_a_stack_brought_through_faults",
    "KlaxonForeignDirectives": "test_a_stack_brought_through_faults",
    "KlaxonRefused": "test_a_stack_brought_through_faults",
    "KlaxonRouterWithoutLease": "test_a_stack_brought_through_faults",
    "KlaxonRouterDeadMan": "test_a_stack_brought_through_faults",
    "KlaxonBatchLeftOut": "test_a_stack_brought_through_faults",
    "KlaxonNotificationLost": "test_a_stack_brought_through_faults",
    "KlaxonDecisionsSlow": "test_a_gate_that_is_frozen_thrown_out_and_fenced",
    "KlaxonSigningKeyEnds": "test_a_gate_that_is_frozen_thrown_out_and_fenced",
    "KlaxonCommitsRefused": "test_a_gate_that_is_frozen_thrown_out_and_fenced",
    "KlaxonWriterFenced": "test_a_gate_that_is_frozen_thrown_out_and_fenced",
    "KlaxonSeatEmpty": "test_a_gate_that_is_frozen_thrown_out_and_fenced",
    "KlaxonProcessDown": "test_a_gate_that_is_frozen_thrown_out_and_fenced",
    "KlaxonProcessRestarts": "test_a_worker_that_restarts_without_its_broker",
    "KlaxonNotReady": "test_a_worker_that_restarts_without_its_broker",
    "KlaxonMemory": "test_a_worker_that_restarts_without_its_broker",
    "KlaxonNotificationWaits": "test_a_receiver_that_never_answers",
    "KlaxonUsersRefused": "test_a_gateway_brought_through_faults",
    "KlaxonEnginesLost": "test_a_gateway_brought_through_faults",
    "KlaxonEnginesDiffer": "test_a_gateway_brought_through_faults",
    "KlaxonWithoutDirective": "test_a_gateway_brought_through_faults",
    "KlaxonMirrorsDropped": "test_a_gateway_brought_through_faults",
    "KlaxonCopiesFail": "test_a_gateway_brought_through_faults",
    "KlaxonEventsDropped": "test_a_gateway_brought_through_faults",
    "KlaxonSecretKeyEnds": "test_a_gateway_brought_through_faults",
}
"""Every alert, and the test in which it fires on what real components of ours exposed."""

EVERY_S: Final = 15
UNITS_S: Final = {"s": 1, "m": 60}

Moment = Mapping[str, "str | None"]
"""Process → what it exposed; None: it did not answer."""
Film = Sequence[Moment]
"""The healthy moment first, then the bad ones."""
Sample = tuple[str, tuple[tuple[str, str], ...]]


@functools.cache
def alerts() -> Mapping[str, Mapping[str, str]]:
    """Every rule by its name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


async def moment(addresses: Mapping[str, str]) -> Moment:
    """What they all expose now."""

    def ask(address: str) -> str | None:
        try:
            answer = get(f"{address}/metrics", timeout_s=3)
        except (OSError, HTTPException):  # gone, or went in the midst of its answer
            return None
        return answer.text if answer.status == 200 else None

    answers = await asyncio.gather(*(asyncio.to_thread(ask, each) for each in addresses.values()))
    return dict(zip(addresses, answers, strict=True))


async def seen(addresses: Mapping[str, str], condition: Callable[[Moment], bool]) -> Moment:
    """The first moment that is so."""

    async def looked() -> Moment | None:
        found = await moment(addresses)
        if condition(found):
            return found
        await asyncio.sleep(0.2)
        return None

    found = await eventually(looked)
    assert found is not None
    return found


async def answered(addresses: Mapping[str, str]) -> Moment:
    """The first moment at which they all answer."""
    return await seen(addresses, lambda now: None not in now.values())


@functools.lru_cache(maxsize=64)
def _samples(text: str) -> Mapping[Sample, float]:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(at: Moment, process: str, name: str, **labels: str) -> float | None:
    """The sum over a process's samples of this name with these labels; None: there is none."""
    found = [
        value
        for (sample, said), value in _samples(at[process] or "").items()
        if sample == name and labels.items() <= dict(said).items()
    ]
    return sum(found) if found else None


def _exposed(at: Moment, names: set[str]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for process, text in at.items():
        target = {"job": "klaxon", "process": process, "instance": f"{process}:9400"}
        if "up" in names:
            found[_series("up", target)] = float(text is not None)
        for (name, labels), value in _samples(text or "").items():
            if name in names:
                found[_series(name, {**dict(labels), **target})] = value
    return found


def _series(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


def _seconds(duration: str | None) -> int:
    return 0 if duration is None else int(duration[:-1]) * UNITS_S[duration[-1]]


def cases(alert: str, film: Film) -> tuple[Case, Case]:
    """The alert does not fire at the end of the healthy moment, and does at the end of the last bad one."""
    rule = alerts()[alert]
    names = {name for name in re.findall(r"\w+", rule["expr"]) if name == "up" or name.startswith("klaxon_")}
    # Several bad moments are one process that goes from bad to worse: together they last long enough.
    hold = (_seconds(rule.get("for")) // max(len(film) - 1, 1) + 60) // EVERY_S
    exposed = [_exposed(at, names) for at in film]
    series: dict[str, str] = {}
    for name in {name: None for at in exposed for name in at}:
        values, there = [], False
        for at in exposed:
            if name in at:
                values.append(f"{at[name]!r}x{hold - 1}")
            else:
                values.append(f"stale _x{hold - 2}" if there else f"_x{hold - 1}")
            there = name in at
        series[name] = " ".join(values)
    healthy_s, bad_s = (hold - 1) * EVERY_S, (len(film) * hold - 1) * EVERY_S
    return (
        Case(alert, series, healthy_s, 0, EVERY_S, "group"),
        Case(alert, series, bad_s, 1, EVERY_S, "group"),
    )


def assert_fire(test: str, films: Mapping[str, Film], folder: Path) -> None:
    """These alerts, all that the table says of this test, fire on these films and not before."""
    assert set(films) == {alert for alert, by in FIRED_BY.items() if by == test}
    assert check_alerts([case for alert, film in films.items() for case in cases(alert, film)], folder) == ""
