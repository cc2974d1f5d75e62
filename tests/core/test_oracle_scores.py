"""The oracle's divergences equal those of an independent solver, and the core's equal the oracle's."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.core.divergence import Half, score_pairs
from pipeline.core.scoring import to_units
from schemas.codec import decode_logits
from schemas.topics import JSON
from tests.oracle.divergence import position, score


@pytest.mark.shared
def test_the_oracles_divergences_equal_an_independent_solvers(shared_dir: Path) -> None:
    cases = json.loads((shared_dir / "data" / "kl" / "vectors.json").read_text())
    checked = [case for case in cases if case["caps"] is None]
    assert len(checked) > 400
    for case in checked:
        p, q = (
            {token: math.exp(value) for token, value in case[side] if value > -9999.0} for side in ("p", "q")
        )
        found = position(p, q, case["eta"])
        for name in ("kl_lower", "js_lower", "tv_lower"):
            assert found[name] == pytest.approx(case[name], abs=case["tolerance"], rel=0), case["name"]


def some_answer(rng: random.Random, kind: str) -> dict[str, Any]:
    """A logit event of a few positions over a small vocabulary; values to 4 decimals."""
    tokens, ids, values = [], [], []
    for _ in range(rng.randrange(1, 5)):
        weights = [rng.expovariate(1) ** 3 + 1e-6 for _ in range(9)]
        total = sum(weights)
        ranked = sorted(range(9), key=lambda i: -weights[i])[: rng.randrange(1, 7)]
        tokens.append(ranked[0] if rng.random() < 0.8 else rng.randrange(9))
        ids.append(ranked)
        # Cut, not rounded: the sum stays below 1.
        values.append([math.floor(math.log(weights[i] / total) * 1e4) / 1e4 for i in ranked])
    return {
        "v": 1, "rollout": "r", "arm": "baseline", "signature": "0" * 32, "ts_us": 0, "duration_us": 0,
        "node": "n", "input_tokens": 1, "model_version": "m", "expected_arms": ["baseline"],
        "definition": "raw",
        "source": rng.choice(("generated", "forced")), "kind": kind, "precision": rng.choice((3, 4, 6)),
        "tokens": tokens, "top_ids": ids, "top_logprobs": values,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["logprobs", "logits"])
def test_the_cores_scores_equal_the_oracles(kind: str) -> None:
    rng = random.Random(3)
    outcomes = set()
    for _ in range(150):
        baseline, other = some_answer(rng, kind), some_answer(rng, kind)
        if other["source"] == "forced" and rng.random() < 0.8:
            shorter = min(len(baseline["tokens"]), len(other["tokens"]))
            other["tokens"][:shorter] = baseline["tokens"][:shorter]
        halves = decode_logits(msgspec.json.encode([baseline, other]), JSON).columns
        got = score_pairs([(Half(halves, 0), Half(halves, 1))])
        want = score(baseline, other)
        assert got.outcome == (want["outcome"],)
        outcomes.add(want["outcome"])
        assert int(got.positions[0]) == want.get("positions", 0)
        if want["outcome"] != "scored":
            continue
        for name in ("kl_lower", "kl_lower_max", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree"):
            units = int(to_units(getattr(got, name))[0])
            assert abs(units - want[name]) <= 2, (name, units, want[name])
    # Softmaxed over what is listed, a token that stands alone has all the probability.
    assert outcomes == {"scored", "forced_mismatch"} | ({"no_position"} if kind == "logprobs" else set())
