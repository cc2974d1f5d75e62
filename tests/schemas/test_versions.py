"""Versions as directives write them: one name for spec, gate and gateway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.routing import Routing
from agents.gateway.settings import EngineSettings, PoolSettings
from agents.router.core import Effective
from pipeline.core.gate.versions import split
from schemas.control import ArmSpec, RolloutSpec
from schemas.events import ARMS
from schemas.versions import version_keys


def arm(model: str, prompt: str | None = None, data: str | None = None, system: str | None = None) -> ArmSpec:
    return ArmSpec(
        model_version=model, prompt_version=prompt, data_version=data, system_version=system, nodes=("*",)
    )


@pytest.mark.parametrize(
    ("baseline", "canary", "named"),
    [
        (arm("v1"), arm("v2"), ("v1", "v2")),
        (arm("v1", "p1"), arm("v2", "p1"), ("v1", "v2")),
        (arm("v1", "p1"), arm("v1", "p2"), ("v1/p1", "v1/p2")),
        (arm("v1"), arm("v1", None, "d2"), ("v1/none", "v1/d2")),
        (arm("v1", "p", "d", "s"), arm("v2", "q", "e", "t"), ("v1/p/d/s", "v2/q/e/t")),
        (arm("v1", "p", "d", "s"), arm("v1", "p", "d", "t"), ("v1/s", "v1/t")),
    ],
)
def test_names(baseline: ArmSpec, canary: ArmSpec, named: tuple[str, str]) -> None:
    assert version_keys({"baseline": baseline, "canary": canary}) == dict(zip(ARMS, named, strict=False))


VERSIONS = st.sampled_from([None, "a", "b"])
ARM = st.builds(arm, st.sampled_from(["v1", "v2"]), VERSIONS, VERSIONS, VERSIONS)


@given(ARM, ARM, ARM | st.none(), st.integers(1, 99))
def test_pools_written_as_in_the_spec_are_weighed_as_the_gate_means(
    baseline: ArmSpec, canary: ArmSpec, control: ArmSpec | None, percent: int
) -> None:
    arms = {"baseline": baseline, "canary": canary, **({} if control is None else {"control": control})}
    keys = version_keys(arms)  # type: ignore[arg-type]
    if keys["baseline"] == keys["canary"]:
        return
    spec = RolloutSpec(rollout="chat", arms=arms, fallback=keys["baseline"])  # type: ignore[arg-type]
    pools = [
        PoolSettings(
            arm=name,  # type: ignore[arg-type]
            kind="vllm",
            model_version=held.model_version,
            prompt_version=held.prompt_version,
            data_version=held.data_version,
            system_version=held.system_version,
            engines=(EngineSettings(node=name, url=f"http://{name}"),),
        )
        for name, held in arms.items()
    ]
    routing = Routing(pools, "chat")
    routing.obey(Effective(split(spec, percent), (), lease_valid=True, dead_man=False), 1)
    assert routing.unknown_versions == ()
    found = sum(
        routing.route(b"%d" % at, None, lambda _: 0).arm == "canary"  # type: ignore[union-attr]
        for at in range(200)
    )
    assert abs(found - 2 * percent) <= 5 * (2 * percent * (1 - percent / 100)) ** 0.5 + 1
