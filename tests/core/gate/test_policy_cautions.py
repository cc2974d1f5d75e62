"""What a policy may not mean: each caution with the policy just beside it that gets none."""

from __future__ import annotations

import pytest

from pipeline.core.gate.policy_cautions import Caution, cautions
from pipeline.policy_file import parse_policy, shipped_policy_text

G3 = "{id: g3, metric: kl_lower, window: 5m, limit: 0.05, scope: [rollout, node], action: rollback_l1}"


def found(*rules: str) -> tuple[Caution, ...]:
    return cautions(parse_policy("rules:\n" + "".join(f"  - {rule}\n" for rule in rules)))


def latency(**fields: object) -> str:
    values = {
        "id": "a", "metric": "ttft_us", "statistic": "p99", "window": "60s", "limit": "300ms",
        "min_samples": 1000, "action": "pause", **fields,
    }  # fmt: skip
    return "{" + ", ".join(f"{name}: {value}" for name, value in values.items()) + "}"


def ruler(**fields: object) -> str:
    return latency(**{"limit": 1.15, "relative_to": "baseline", **fields})


@pytest.mark.parametrize(
    ("rules", "codes"),
    [
        ((G3,), []),
        ((G3.replace("}", ", mode: observe}"),), ["nothing_enforces"]),
        ((G3.replace("rollback_l1", "advise"),), ["nothing_enforces"]),
        ((latency(),), []),
        # B2 as written, and a second more than it.
        ((latency(window="10s", statistic="p95", consecutive=3),), ["short_latency_window"]),
        ((latency(window="11s", statistic="p95", consecutive=3),), []),
        ((G3, latency(window="10s", statistic="p95", mode="observe")), []),
        # Ten values beyond the quantile, one fewer.
        ((latency(min_samples=999),), ["thin_tail"]),
        ((latency(statistic="p95", min_samples=200),), []),
        ((latency(statistic="p95", min_samples=199),), ["thin_tail"]),
        ((latency(statistic="mean", min_samples=100),), []),
        ((G3, latency(min_samples=100, mode="observe")), []),
        # G2's ruler, with samples enough and one fewer.
        ((ruler(min_samples=1000),), []),
        ((ruler(min_samples=999),), ["few_for_ratio"]),
        ((ruler(min_samples=999, evidence="anytime"),), []),
        ((G3, ruler(min_samples=100, mode="observe")), []),
        ((ruler(limit="1000000000"),), []),
        ((ruler(), ruler(id="b", action="rollback_l1")), ["never_first"]),
        ((ruler(), latency(id="b", action="rollback_l1", limit="1us")), []),
        ((G3.replace("kl_lower", "kl_floor"),), ["floor_estimator"]),
        ((G3.replace("kl_lower", "kl_floor").replace("0.05", "0.160"),), ["floor_estimator"]),
        ((G3.replace("kl_lower", "kl_floor").replace("0.05", "0.161"),), []),
        ((G3.replace("0.05", "1024"),), ["never_over"]),
        ((G3.replace("0.05", "1023"),), []),
        ((latency(limit="24h"),), ["never_over"]),
        ((latency(metric="ttft_over_share", over="500ms", limit="100%", statistic=None),), ["never_over"]),
        ((latency(metric="ttft_over_share", over="500ms", limit="99%", statistic=None),), []),
        # A pause above, at and below the limit of a roll-back.
        (
            (G3, G3.replace("g3", "b").replace("rollback_l1", "pause").replace("0.05", "0.06")),
            ["never_first"],
        ),
        ((G3, G3.replace("g3", "b").replace("rollback_l1", "pause")), ["never_first"]),
        ((G3, G3.replace("g3", "b").replace("rollback_l1", "pause").replace("0.05", "0.04")), []),
        ((G3, G3.replace("g3", "b").replace("rollback_l1", "pause").replace("5m", "1m")), []),
        ((G3, G3.replace("g3", "b").replace("rollback_l1", "pause").replace("node]", "context]")), []),
        ((G3, G3.replace("g3", "b").replace("rollback_l1", "pause").replace("}", ", min_samples: 99}")), []),
        ((G3, G3.replace("g3", "b").replace("rollback_l1", "pause").replace("}", ", mode: observe}")), []),
        ((G3.replace("}", ", hold: 2s}"), G3.replace("g3", "b").replace("rollback_l1", "pause")), []),
    ],
)
def test_cautions(rules: tuple[str, ...], codes: list[str]) -> None:
    rules = tuple(rule.replace("statistic: None, ", "") for rule in rules)
    assert [one.code for one in found(*rules)] == codes


def test_a_caution_names_rule_number_and_remedy() -> None:
    (one,) = found(latency(min_samples=100))
    assert one.rule == "a"
    assert one.sentence == (
        "ttft_us p99 of 100 samples rests on the 2 slowest of them, and slow requests come in bursts"
    )
    assert one.remedy == "min_samples: 1000, or `mode: observe`"


def test_the_shipped_policy_needs_none() -> None:
    assert cautions(parse_policy(shipped_policy_text())) == ()
