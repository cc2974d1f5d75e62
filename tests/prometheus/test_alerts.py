"""The alert rules: each fires over its limit and not at it, and names a runbook and metrics that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import MonitoringConfig
from pipeline.monitoring.metrics import ALL, METRICS
from tests.conftest import REPOSITORY
from tests.prometheus.promtool import FOLDER, RULES, Case, check_alerts, promtool

ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}

REQUESTS = 'klaxon_evidence_age_seconds{topic="klaxon.requests",partition="%d",process="measure"}'
SIGNING_KEY = 'klaxon_signing_key_valid_seconds{gating_partition="%d",process="gate",instance="a"}'
USERS = 'klaxon_gateway_requests_total{instance="g",outcome="%s"}'
MIRRORS = 'klaxon_gateway_mirrors_total{instance="g",outcome="%s"}'
SECRET_KEY = 'klaxon_gateway_%s_key_valid_seconds{instance="g"}'
UNPUBLISHED = 'klaxon_gateway_events_dropped_total{instance="g",reason="queue_full"}'
COUNTED = 'klaxon_counted_total{topic="klaxon.requests",outcome="%s"}'

CASES: dict[str, tuple[Case, ...]] = {
    "KlaxonEvidenceSilent": (
        Case("", {REQUESTS % 0: "31x20", REQUESTS % 1: "90x20"}, 60, 1),
        Case("", {REQUESTS % 0: "30x20", REQUESTS % 1: "90x20"}, 60, 0),  # one partition is heard
        Case("", {REQUESTS % 0: "31x20"}, 15, 0),  # not for long enough
        Case("", {'klaxon_evidence_age_seconds{topic="klaxon.telemetry",partition="0"}': "90x20"}, 60, 0),
    ),
    "KlaxonTelemetrySilent": (
        Case("", {'klaxon_evidence_age_seconds{topic="klaxon.telemetry",partition="0"}': "121x20"}, 120, 1),
        Case("", {'klaxon_evidence_age_seconds{topic="klaxon.telemetry",partition="0"}': "120x20"}, 120, 0),
    ),
    "KlaxonLagging": (
        Case("", {'klaxon_log_age_seconds{topic="klaxon.logits",partition="1"}': "30.1x20"}, 90, 1),
        Case("", {'klaxon_log_age_seconds{topic="klaxon.logits",partition="1"}': "30x20"}, 90, 0),
    ),
    "KlaxonCoverageLow": (
        Case(
            "",
            {
                'klaxon_rollout_coverage_ratio{rollout="r"}': "0.89x20",
                'klaxon_rollout_expected_pairs{rollout="r"}': "100x20",
            },
            180,
            1,
        ),
        Case(
            "",
            {
                'klaxon_rollout_coverage_ratio{rollout="r"}': "0.9x20",
                'klaxon_rollout_expected_pairs{rollout="r"}': "100x20",
            },
            180,
            0,
        ),
        Case(
            "",
            {
                'klaxon_rollout_coverage_ratio{rollout="r"}': "0.5x20",
                'klaxon_rollout_expected_pairs{rollout="r"}': "99x20",
            },
            180,
            0,
        ),
    ),
    "KlaxonUnknownSeconds": (
        Case("", {'klaxon_unknown_seconds{gating_partition="2"}': "1x20"}, 90, 1),
        Case("", {'klaxon_unknown_seconds{gating_partition="2"}': "0x20"}, 90, 0),
    ),
    "KlaxonDeadLetters": (
        Case("", {'klaxon_dead_letters_total{topic="klaxon.logits",reason="value"}': "0+1x40"}, 360, 1),
        Case("", {'klaxon_dead_letters_total{topic="klaxon.logits",reason="value"}': "0x20 10x20"}, 540, 0),
    ),
    "KlaxonLateEvents": (
        Case("", {COUNTED % "late": "0+2x60", COUNTED % "requests": "0+100x60"}, 660, 1),
        Case("", {COUNTED % "late": "0+1x60", COUNTED % "requests": "0+100x60"}, 660, 0),
    ),
    "KlaxonCellsCapped": (
        Case("", {'klaxon_capped_cells_total{topic="klaxon.logits",partition="0"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_capped_cells_total{topic="klaxon.logits",partition="0"}': "7x20"}, 120, 0),
    ),
    "KlaxonSettingsDiffer": (
        Case("", {'klaxon_foreign_settings_total{gating_partition="0"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_foreign_settings_total{gating_partition="0"}': "1x20"}, 120, 0),
    ),
    "KlaxonFinalsConflict": (
        Case("", {'klaxon_conflicting_finals_total{gating_partition="0"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_conflicting_finals_total{gating_partition="0"}': "1x20"}, 120, 0),
    ),
    "KlaxonTripped": (
        Case("", {'klaxon_rollout_tripped{rollout="r"}': "0x3 1x20"}, 60, 1),
        Case("", {'klaxon_rollout_tripped{rollout="r"}': "0x20"}, 60, 0),
    ),
    "KlaxonRolloutPaused": (
        Case("", {'klaxon_rollout_paused{rollout="r"}': "1x100"}, 960, 1),
        Case("", {'klaxon_rollout_paused{rollout="r"}': "1x100"}, 600, 0),
    ),
    "KlaxonGateBlind": (
        Case("", {'klaxon_rollout_blind{rollout="r"}': "1x20"}, 60, 1),
        Case("", {'klaxon_rollout_blind{rollout="r"}': "1 1 0x20"}, 60, 0),
    ),
    "KlaxonSeatEmpty": (
        Case("", {f'klaxon_seat_taken{{gating_partition="{at}"}}': "1x20" for at in range(3)}, 90, 1),
        Case("", {}, 90, 1),  # no gate at all
        Case("", {f'klaxon_seat_taken{{gating_partition="{at}"}}': "1x20" for at in range(4)}, 90, 0),
    ),
    "KlaxonWriterFenced": (
        Case("", {'klaxon_writers_fenced_total{gating_partition="0"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_writers_fenced_total{gating_partition="0"}': "0x20"}, 120, 0),
    ),
    "KlaxonDecisionsSlow": (
        Case(
            "",
            {
                'klaxon_decision_seconds_bucket{le="1.0"}': "0x200",
                'klaxon_decision_seconds_bucket{le="2.5"}': "0+1x200",
                'klaxon_decision_seconds_bucket{le="+Inf"}': "0+1x200",
            },
            1500,
            1,
        ),
        Case(
            "",
            {
                'klaxon_decision_seconds_bucket{le="1.0"}': "0+1x200",
                'klaxon_decision_seconds_bucket{le="2.5"}': "0+1x200",
                'klaxon_decision_seconds_bucket{le="+Inf"}': "0+1x200",
            },
            1500,
            0,
        ),
    ),
    "KlaxonForeignDirectives": (
        Case("", {'klaxon_foreign_directives_total{gating_partition="0"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_foreign_directives_total{gating_partition="0"}': "_x5 1x20"}, 120, 1),
        Case("", {'klaxon_foreign_directives_total{gating_partition="0"}': "1x100"}, 1200, 0),
        Case("", {'klaxon_foreign_directives_total{gating_partition="0"}': "0x20"}, 120, 0),
    ),
    "KlaxonRefused": (
        Case("", {'klaxon_refused_total{what="directive",reason="wrong_signature"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_refused_total{what="directive",reason="replayed"}': "0x5 1x20"}, 120, 1),
        Case("", {'klaxon_refused_total{what="directive",reason="replayed"}': "4x20"}, 120, 0),
        Case("", {'klaxon_refused_total{what="command",reason="unsigned"}': "_x5 1x20"}, 120, 1),
        Case("", {'klaxon_refused_total{what="command",reason="unsigned"}': "1x100"}, 1200, 0),
        Case("", {'klaxon_refused_total{what="command",reason="expired"}': "_x5 1x20"}, 120, 0),
        Case("", {'klaxon_refused_total{what="command",reason="rule"}': "0x5 9x20"}, 120, 0),
        Case("", {'klaxon_refused_total{what="directive",reason="expired"}': "0x5 9x20"}, 120, 0),
    ),
    "KlaxonRouterWithoutLease": (
        Case("", {"klaxon_router_expired_leases": "1x20"}, 60, 1),
        Case("", {"klaxon_router_expired_leases": "1 0x20"}, 60, 0),
    ),
    "KlaxonRouterDeadMan": (
        Case("", {"klaxon_router_dead_man": "1x20"}, 15, 1),
        Case("", {"klaxon_router_dead_man": "0x20"}, 15, 0),
    ),
    "KlaxonUsersRefused": (
        Case("", {USERS % "engine_away": "0+2x40", USERS % "answered": "0+100x40"}, 300, 1),
        Case("", {USERS % "engine_away": "0+1x40", USERS % "answered": "0+99x40"}, 300, 0),  # 1 %
        Case("", {USERS % "engine_away": "0+101x40", USERS % "answered": "0+9899x40"}, 300, 1),  # just over
        Case("", {USERS % "client_gone": "0+50x40", USERS % "answered": "0+100x40"}, 300, 0),
        Case("", {USERS % "not_found": "0+50x40", USERS % "answered": "0+1x40"}, 300, 0),
        Case("", {USERS % "no_route": "0+1x40"}, 300, 1),
    ),
    "KlaxonEnginesLost": (
        Case("", {'klaxon_gateway_engines_lost{instance="g"}': "1x20"}, 180, 1),
        Case("", {'klaxon_gateway_engines_lost{instance="g"}': "1x20"}, 90, 0),  # not for long enough
        Case("", {'klaxon_gateway_engines_lost{instance="g"}': "0x20"}, 180, 0),
    ),
    "KlaxonEnginesDiffer": (
        Case("", {'klaxon_gateway_engine_differences{instance="g"}': "1x40"}, 330, 1),
        Case("", {'klaxon_gateway_engine_differences{instance="g"}': "0x40"}, 330, 0),
    ),
    "KlaxonWithoutDirective": (
        Case("", {'klaxon_gateway_routed_total{instance="g",reason="no_directive"}': "0+1x100"}, 900, 1),
        Case("", {'klaxon_gateway_routed_total{instance="g",reason="no_directive"}': "7x100"}, 900, 0),
        Case("", {'klaxon_gateway_routed_total{instance="g",reason="weights"}': "0+1x100"}, 900, 0),
    ),
    "KlaxonMirrorsDropped": (
        Case("", {MIRRORS % "queue_full": "0+11x60", MIRRORS % "mirrored": "0+100x60"}, 600, 1),
        Case("", {MIRRORS % "queue_full": "0+10x60", MIRRORS % "mirrored": "0+100x60"}, 600, 0),
        Case("", {MIRRORS % "stopped": "0+50x60", MIRRORS % "mirrored": "0+100x60"}, 600, 0),
        Case(
            "",
            {
                MIRRORS % "queue_full": "0+6x60",
                MIRRORS % "overdue": "0+5x60",
                MIRRORS % "mirrored": "0+100x60",
            },
            600,
            1,
        ),
    ),
    "KlaxonCopiesFail": (
        Case("", {MIRRORS % "failed": "0+11x60", MIRRORS % "answered": "0+89x60"}, 600, 1),
        Case("", {MIRRORS % "failed": "0+10x60", MIRRORS % "answered": "0+90x60"}, 600, 0),
        Case("", {MIRRORS % "timed_out": "0+1x60"}, 600, 1),
    ),
    "KlaxonEventsDropped": (
        Case("", {UNPUBLISHED: "0x5 1x20"}, 180, 1),
        Case("", {UNPUBLISHED: "5x40"}, 180, 0),
    ),
    "KlaxonSecretKeyEnds": (
        Case("", {SECRET_KEY % "text": "1209599x20", SECRET_KEY % "signature": "9e6x20"}, 120, 1),
        Case("", {SECRET_KEY % "text": "9e6x20", SECRET_KEY % "signature": "1209599x20"}, 120, 1),
        Case("", {SECRET_KEY % "pseudonym": "0x20"}, 120, 1),
        Case("", {SECRET_KEY % "text": "1209600x20", SECRET_KEY % "pseudonym": "1209600x20"}, 120, 0),
    ),
    "KlaxonArchiveBehind": (
        Case(
            "",
            {
                'klaxon_archive_behind_seconds{topic="klaxon.pairs",partition="0"}': "301x20",
                'klaxon_archive_behind_seconds{topic="klaxon.pairs",partition="1"}': "0x20",
            },
            90,
            1,
        ),
        Case("", {'klaxon_archive_behind_seconds{topic="klaxon.pairs",partition="0"}': "300x20"}, 90, 0),
    ),
    "KlaxonRetentionAtRisk": (
        Case("", {'klaxon_retention_at_risk{topic="klaxon.logits",partition="0"}': "1x20"}, 15, 1),
        Case("", {'klaxon_retention_at_risk{topic="klaxon.logits",partition="0"}': "0x20"}, 15, 0),
    ),
    "KlaxonRecordsDeleted": (
        Case("", {'klaxon_deleted_records{topic="klaxon.logits",partition="0"}': "1x20"}, 15, 1),
        Case("", {'klaxon_deleted_records{topic="klaxon.logits",partition="0"}': "0x20"}, 15, 0),
    ),
    "KlaxonProcessDown": (
        Case("", {'up{job="klaxon",instance="a"}': "0x20", 'up{job="klaxon",instance="b"}': "1x20"}, 90, 1),
        Case("", {'up{job="klaxon",instance="a"}': "1x20", 'up{job="other",instance="b"}': "0x20"}, 90, 0),
    ),
    "KlaxonProcessRestarts": (
        Case("", {"klaxon_start_time_seconds": "1 2 3 4x20"}, 90, 1),
        Case("", {"klaxon_start_time_seconds": "1 2 3x20"}, 90, 0),
    ),
    "KlaxonNotReady": (
        Case("", {"klaxon_ready": "0x40"}, 330, 1),
        Case("", {"klaxon_ready": "0x10 1x30"}, 330, 0),
    ),
    "KlaxonSigningKeyEnds": (
        Case("", {SIGNING_KEY % 0: "1209599x20", SIGNING_KEY % 1: "1209599x20"}, 120, 1),
        Case("", {SIGNING_KEY % 0: "0x20"}, 120, 1),
        Case("", {SIGNING_KEY % 0: "1209600x20"}, 120, 0),
    ),
    "KlaxonNotificationWaits": (
        Case("", {'klaxon_notification_wait_seconds{instance="a"}': "301x20"}, 90, 1),
        Case("", {'klaxon_notification_wait_seconds{instance="a"}': "300x20"}, 90, 0),
    ),
    "KlaxonNotificationLost": (
        Case("", {"klaxon_notifications_refused_total": "0x5 1x20"}, 120, 1),
        Case("", {"klaxon_notifications_given_up_total": "0x5 1x20"}, 120, 1),
        Case(
            "",
            {"klaxon_notifications_refused_total": "3x20", "klaxon_notifications_given_up_total": "3x20"},
            120,
            0,
        ),
    ),
    "KlaxonMemory": (
        Case("", {"klaxon_resident_bytes": "2147483649x40"}, 330, 1),
        Case("", {"klaxon_resident_bytes": "2147483648x40"}, 330, 0),
    ),
    "KlaxonBatchLeftOut": (
        Case("", {"klaxon_batches_left_out_total": "0x5 1x20"}, 120, 1),
        Case("", {"klaxon_batches_left_out_total": "_x5 1x20"}, 120, 1),  # before the first scrape
        Case("", {"klaxon_batches_left_out_total": "1x100"}, 1200, 0),
        Case("", {"klaxon_batches_left_out_total": "0x20"}, 120, 0),
    ),
    "KlaxonCommitsRefused": (
        Case("", {"klaxon_commits_refused_total": "0+1x60"}, 600, 1),
        Case("", {"klaxon_commits_refused_total": "0x20 5x40"}, 600, 0),
    ),
}


def _named(alert: str, case: Case) -> Case:
    return Case(alert, case.series, case.at_s, case.firing, case.interval_s)


def test_every_alert_has_a_firing_and_a_quiet_case() -> None:
    assert set(CASES) == set(ALERTS)
    for alert, cases in CASES.items():
        assert {bool(case.firing) for case in cases} == {True, False}, alert


def test_alerts_fire_over_their_limits_and_not_at_them(tmp_path: Path) -> None:
    said = check_alerts([_named(alert, case) for alert, cases in CASES.items() for case in cases], tmp_path)
    assert said == ""


def test_known_bad_a_wrong_expectation_is_told(tmp_path: Path) -> None:
    wrong = Case("KlaxonRouterDeadMan", {"klaxon_router_dead_man": "0x20"}, 15, 1)
    assert "KlaxonRouterDeadMan" in check_alerts([wrong], tmp_path)


def test_promtool_finds_rules_and_configuration_valid() -> None:
    ran = subprocess.run(
        [promtool(), "check", "config", "prometheus.yml"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    known = {metric.name: metric for metric in METRICS}
    for alert, rule in ALERTS.items():
        for name, matchers in re.findall(r"\b(klaxon_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            metric = known[name.removesuffix("_bucket")] if name not in known else known[name]
            for label in re.findall(r"(\w+)\s*=", matchers):
                assert label in {*metric.labels, "process", "le"}, f"{alert}: {name} has no label {label}"


def test_every_alert_names_its_part_of_the_runbook() -> None:
    text = (REPOSITORY / "docs" / "operate.md").read_text()
    part = text.partition("## What each alert means and what to do\n")[2].partition("\n## ")[0]
    sections = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-"): body
        for title, body in re.findall(r"^### (.+)\n((?:(?!^###).*\n?)*)", part, re.MULTILINE)
    }
    anchors: set[str] = set()
    for alert, rule in ALERTS.items():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operate.md"
        assert f"`{alert}` ({rule['labels']['severity']})" in sections[anchor], alert
        anchors.add(anchor)
    assert anchors == set(sections), "a section is of no alert"
    for anchor in re.findall(r"\]\(#([^)]+)\)", part):
        assert anchor in sections


def test_the_scrape_example_has_every_process_at_its_port() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    found = {each["labels"]["process"]: each["targets"] for each in job["static_configs"]}
    config = MonitoringConfig()
    assert found == {process: [f"{config.host}:{config.port_of(process)}"] for process in ALL}


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_who_should_mind(alert: str) -> None:
    assert ALERTS[alert]["labels"]["severity"] in ("page", "ticket")
    assert ALERTS[alert]["annotations"]["summary"]
