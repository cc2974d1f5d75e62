"""Policies: what they may say, and that every mistake is named with its line, field and remedy."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import pytest

from pipeline.policy_file import PolicyError, parse_policy, read_policy_file, shipped_policy_text

RULE = """rules:
  - id: a
    metric: kl_lower
    window: 5m
    limit: 0.05
    action: rollback_l1
"""


def test_the_shipped_policy_holds_the_reference_numbers() -> None:
    text = shipped_policy_text()
    policy = parse_policy(text)
    rules = {rule.id: rule for rule in policy.rules}
    g3, g5, p99, p50 = (rules[name] for name in ("G3-divergence", "G5-slow-share", "B1-p99", "B1-p50"))
    assert (g3.metric.label, g3.limit, g3.window_s, g3.min_samples) == (
        "kl_lower mean",
        Fraction(1, 20),
        300,
        100,
    )
    assert "node_context" in g3.scopes
    assert (g5.metric.over, g5.limit, g5.window_s, g5.min_samples) == (500_000, Fraction(1, 20), 300, 100)
    assert (p99.limit, p99.window_s, p99.hold_steps, p99.action) == (310_000, 60, 30, "fallback")
    assert (p50.limit, p50.window_s) == (180_000, 60)
    assert {g3.action, g5.action} == {"rollback_l1"}
    assert g3.enforcing
    assert g5.enforcing
    assert policy.coverage.limit == Fraction(9, 10)
    assert policy.hash == hashlib.sha256(text.encode()).hexdigest()
    assert all(rule.capability in text for rule in policy.rules if rule.capability)
    node, whole, speed = (rules[name] for name in ("G2-ttft-node", "G2-ttft-stratum", "G2-tps-stratum"))
    for ruler in (node, whole, speed):
        assert (ruler.limit, ruler.window_s, ruler.hold_steps) == (Fraction(115, 100), 60, 30)
        assert (ruler.min_samples, ruler.relative_to, ruler.capability) == (1000, "baseline", "G2")
        assert not ruler.enforcing, "cries wolf at low rates"
    assert (node.metric.label, node.scopes, node.action) == ("ttft_us p99", ("node_context",), "eject_node")
    assert (whole.scopes, whole.action) == (("stratum",), "pause")
    assert speed.metric.label == "tokens_per_s p50"
    assert policy.ejection.max_share == Fraction(1, 5)
    assert not [
        rule.id for rule in policy.rules if rule.enforcing and rule.action in ("narrow", "eject_node")
    ]


def test_defaults() -> None:
    policy = parse_policy(RULE)
    (rule,) = policy.rules
    assert (rule.mode, rule.scopes, rule.min_samples, rule.hold_steps) == ("enforce", ("rollout",), 100, 1)
    assert (policy.progression.mode, policy.progression.min_pairs) == ("auto", 300)
    assert policy.coverage.action == "hold"


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("window: 5m", "windw: 5m", 4, "did you mean 'window'"),
        ("metric: kl_lower", "metric: kl_lowr", 3, "did you mean 'kl_lower'"),
        ("metric: kl_lower", "metric: coverage", 3, "section `coverage`"),
        ("window: 5m", "window: 5", 4, "duration with its unit"),
        ("window: 5m", "window: 500ms", 4, "whole seconds"),
        ("window: 5m", "window: 0s", 4, "above 0"),
        ("window: 5m", "window: 2h", 4, "3600s"),
        ("limit: 0.05", "limit: .nan", 5, "finite"),
        ("    limit: 0.05", "    limit: 1.0e-310\n    evidence: anytime", 5, "no finer"),
        ("limit: 0.05", "limit: yes", 5, "number"),
        ("limit: 0.05", "limit: -1", 5, "never below 0"),
        ("action: rollback_l1", "action: rolback_l1", 6, "did you mean 'rollback_l1'"),
        ("action: rollback_l1", "action: eject_node", 2, "scope must be of node, node_context"),
        ("action: rollback_l1", "scope: [node, context]\n    action: eject_node", 6, "scope must be of node"),
        ("action: rollback_l1", "arm: control\n    action: narrow", 7, "arm must be canary"),
        ("action: rollback_l1", "mode: enforce", 2, "action is missing"),
        ("    limit: 0.05\n", "", 2, "limit is missing"),
        ("    limit: 0.05", "    limit: 0.05\n    evidence: anytime\n    hold: 3s", 7, "adds up by itself"),
        ("    limit: 0.05", "    limit: 4\n    evidence: anytime", 5, "below 4 nats"),
        ("    limit: 0.05", "    limit: 0\n    evidence: anytime", 5, "above 0"),
        (
            "metric: kl_lower",
            "evidence: anytime\n    metric: ttft_over_share\n    over: 500ms",
            3,
            "use point",
        ),
        ("metric: kl_lower", "arm: control\n    metric: excess", 3, "over the control's"),
        (
            "metric: kl_lower\n    window: 5m\n    limit: 0.05",
            "metric: excess\n    window: 5m\n    limit: 0",
            5,
            "tolerance above 0",
        ),
        ("rules:", "sequential: {alpha: 0}\nrules:", 1, "such as 0.05"),
        ("rules:", "sequential: {alpha: 0.51}\nrules:", 1, "such as 0.05"),
        ("rules:", "sequential: {alhpa: 0.05}\nrules:", 1, "did you mean 'alpha'"),
        ("    limit: 0.05", "    limit: 0.05\n    evidence: vibes", 6, "unknown evidence"),
        (
            "    limit: 0.05",
            "    limit: 0.05\n    relative_to: baseline",
            6,
            "distance from the baseline already",
        ),
        ("    limit: 0.05", "    limit: 0.05\n    step: 5s", 6, "1s"),
        ("    limit: 0.05", "    limit: 0.05\n    min_samples: 0", 6, "whole number"),
        ("    limit: 0.05", "    limit: 0.05\n    min_samples: true", 6, "whole number"),
        ("    limit: 0.05", "    limit: 0.05\n    hold: 3s\n    consecutive: 3", 7, "keep one"),
        ("    limit: 0.05", "    limit: 0.05\n    scope: [rollout, nod]", 6, "did you mean 'node'"),
        ("    limit: 0.05", "    limit: 0.05\n    scope: [rollout, stratum]", 6, "unknown scope 'stratum'"),
        ("    limit: 0.05", "    limit: 0.05\n    scope: [node, node]", 6, "twice"),
        ("    limit: 0.05", "    limit: 0.05\n    scope: []", 6, "scope"),
        ("    limit: 0.05", "    limit: 0.05\n    mode: watch", 6, "unknown mode"),
        ("    limit: 0.05", "    limit: 0.05\n    arm: baseline", 6, "against the baseline"),
        ("    limit: 0.05", "    limit: 0.05\n    traffic: user", 6, "request metric"),
        ("    limit: 0.05", "    limit: 0.05\n    over: 500ms", 6, "ttft_over_share"),
        ("    limit: 0.05", "    limit: 0.05\n    statistic: p99", 6, "none of kl_lower"),
        ("id: a", "id: a b", 2, "letters"),
        ("id: a", "id: 7", 2, "text is expected"),
        ("rules:", "rule:", 1, "did you mean 'rules'"),
        ("rules:", "version: 2\nrules:", 1, "it reads 1"),
        ("rules:", "progression: {mode: sometimes}\nrules:", 1, "unknown mode"),
        ("rules:", "coverage: {limit: 1.1}\nrules:", 1, "0..1"),
        ("rules:", "coverage: {action: trip}\nrules:", 1, "hold"),
        ("rules:", "ejection: {max_share: 120%}\nrules:", 1, "0..1"),
        ("rules:", "ejection: {share: 20%}\nrules:", 1, "did you mean"),
        ("    limit: 0.05", "    limit: 0.05\n    limit: 0.06", 6, "twice"),
        ("    limit: 0.05", "    limit: [0.05", 6, "mend the YAML"),
    ],
)
def test_every_mistake_is_named(before: str, after: str, line: int, words: str) -> None:
    assert before in RULE
    with pytest.raises(PolicyError) as caught:
        parse_policy(RULE.replace(before, after), "policy.yaml")
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"policy.yaml:{caught.value.line}: ")
    if "mend" not in words:
        assert caught.value.line == line


RULER = """rules:
  - id: ruler
    metric: ttft_us
    statistic: p99
    relative_to: baseline
    window: 60s
    limit: 1.15
    scope: stratum
    action: pause
"""


def test_rulers_relative_to_the_baseline() -> None:
    (rule,) = parse_policy(RULER).rules
    assert (rule.relative_to, rule.limit, rule.limit_ratio) == ("baseline", Fraction(23, 20), (23, 20))
    assert rule.label == "ttft_us p99: canary / baseline"
    (slower,) = parse_policy(RULER.replace("ttft_us", "tokens_per_s").replace("p99", "p50")).rules
    assert slower.label == "tokens_per_s p50: baseline / canary"
    assert parse_policy(RULER).ejection.max_share == Fraction(1, 5)
    assert parse_policy(RULER + "ejection: {max_share: 1/3}".replace("1/3", "30%")).ejection.max_share == (
        Fraction(3, 10)
    )


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("limit: 1.15", "limit: 0.99", 7, "at least 1"),
        ("limit: 1.15", "limit: 115%", 7, "number"),
        ("    limit: 1.15\n", "", 2, "limit is missing"),
        ("relative_to: baseline", "relative_to: past", 5, "supported: baseline"),
        ("relative_to: baseline", "relative_to: canary", 5, "unknown relative_to"),
        ("statistic: p99", "statistic: mean", 5, "quantiles are compared"),
        ("metric: ttft_us", "metric: tokens_per_second", 3, "did you mean 'tokens_per_s'"),
        ("scope: stratum", "scope: stratum\n    arm: any", 9, "canary or control is compared"),
        ("scope: stratum", "scope: stratum\n    arm: baseline", 9, "canary or control is compared"),
        ("scope: stratum\n    action: pause", "action: narrow\n    traffic: user", 9, "all traffic"),
    ],
)
def test_every_mistake_of_a_ruler_is_named(before: str, after: str, line: int, words: str) -> None:
    assert before in RULER
    with pytest.raises(PolicyError) as caught:
        parse_policy(RULER.replace(before, after), "policy.yaml")
    assert words in str(caught.value)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "rules: [{id: t, metric: tokens_per_s, statistic: p50, window: 60s, limit: 20, action: pause}]",
            "relative_to: baseline",
        ),
        (
            "rules: [{id: t, metric: tokens_per_s, relative_to: baseline, window: 60s, limit: 1.15,"
            " statistic: mean, action: pause}]",
            "a quantile such as p50",
        ),
        (
            "rules: [{id: t, metric: ttft_over_share, over: 500ms, window: 60s, limit: 1.15,"
            " relative_to: baseline, action: pause}]",
            "quantiles are compared",
        ),
        ("rules: []", "at least one rule"),
        ("", "at least one rule"),
        ("- 3", "keys are expected"),
        ("rules: [3]", "keys are expected"),
        (RULE + RULE.removeprefix("rules:\n"), "stands twice"),
        ("rules: [{id: t, metric: ttft_us, window: 60s, limit: 310ms, action: pause}]", "needs `statistic`"),
        (
            "rules: [{id: t, metric: ttft_us, statistic: p0, window: 60s, limit: 3ms, action: pause}]",
            "none of ttft_us",
        ),
        (
            "rules: [{id: t, metric: ttft_us, statistic: p99, window: 60s, limit: 310, action: pause}]",
            "duration",
        ),
        ("rules: [{id: t, metric: ttft_over_share, window: 60s, limit: 5%, action: pause}]", "needs `over`"),
        (
            "rules: [{id: t, metric: ttft_over_share, over: 505ms, window: 60s, limit: 5%, action: pause}]",
            "500000us and 510083us",
        ),
        (
            "rules: [{id: t, metric: ttft_over_share, over: 500ms, window: 60s, limit: x%, action: pause}]",
            "5%",
        ),
    ],
)
def test_more_mistakes(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        parse_policy(text)


@pytest.mark.parametrize("limit", ["5%", "0.05", "5.0 %"])
def test_shares_can_be_written_in_percent(limit: str) -> None:
    text = "rules: [{id: t, metric: ttft_over_share, over: 500ms, window: 60s, limit: 5%, action: pause}]"
    assert parse_policy(text.replace("5%", limit)).rules[0].limit == Fraction(1, 20)


def test_quantiles_are_exact_fractions() -> None:
    text = "rules: [{id: t, metric: itl_us, statistic: p99.9, window: 60s, limit: 0.5ms, action: pause}]"
    (rule,) = parse_policy(text).rules
    assert (rule.metric.quantile, rule.limit) == (Fraction(999, 1000), 500)


def test_files_that_cannot_be_read(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    with pytest.raises(PolicyError, match="name another file"):
        read_policy_file(str(folder / "absent.yaml"))
    (folder / "latin.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="UTF-8"):
        read_policy_file(str(folder / "latin.yaml"))


NINE = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules: &a [*a]\n", "levels inside each other"),
        ("rules: &a\n  - id: *a\n", "levels inside each other"),
        ("rules: " + "[" * 500 + "]" * 500, "levels inside each other"),
        ("\n".join(NINE), "values, aliases spelled out"),
        ("2024-99-99: 1\n", "month must be in 1..12"),
        ("? [a, b]\n: c\n", "where a key is expected"),
        (RULE + "    <<: {window: 3s}\n", "write the keys out"),
        (RULE.replace("0.05", "0x" + "F" * 20_000), "more than 64 bits"),
        (RULE.replace("0.05", "9" * 4_000), "more than 64 bits"),
        (RULE.replace("0.05", '"\\ud800"'), "surrogates"),
        (RULE.replace("0.05", '"a\\0b"'), "NUL character"),
        (RULE.replace("5m", "9" * 6_000 + "m"), "a duration with its unit"),
        (RULE.replace("5m", '"5m\\n"'), "a duration with its unit"),
        (RULE.replace("id: a", 'id: "a\\n"'), "letters, digits"),
        (RULE + "coverage: {limit: 1e99999999%}\n", "a share such as"),
        (RULE + "coverage: {limit: 1/2%}\n", "a share such as"),
    ],
)
def test_hostile_text_is_a_mistake_and_no_crash(text: str, words: str) -> None:
    """Policies travel in commands: whatever one says, the gate that reads it must go on."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, "p.yaml")
    assert words in str(caught.value)
    assert str(caught.value).startswith("p.yaml:")
