"""Versions of a roll-out: how directives name them, and how its weights are split."""

from __future__ import annotations

from itertools import pairwise

from schemas.control import RolloutSpec
from schemas.events import Arm
from schemas.versions import DIMENSIONS, version_keys


class SpecError(Exception):
    """A spec that cannot be rolled out; the message holds the remedy."""


def differing_mask(spec: RolloutSpec, arm: Arm) -> int:
    """Bits of the version dimensions in which this arm is meant to differ from the baseline (V1)."""
    baseline, other = spec.arms["baseline"], spec.arms[arm]
    mask = 0
    for bit, name in enumerate(DIMENSIONS):
        if getattr(baseline, name) != getattr(other, name):
            mask |= 1 << bit
    return mask


def fallback_key(spec: RolloutSpec) -> str:
    """The version to fall back to, by the name that directives use for it."""
    keys = version_keys(spec.arms)
    for arm in ("baseline", "canary"):
        if spec.fallback in (keys[arm], spec.arms[arm].model_version):
            return keys[arm]
    return spec.fallback


def split(spec: RolloutSpec, canary_percent: float) -> dict[str, float]:
    """Weights with this share on the canary; they sum to 100."""
    keys = version_keys(spec.arms)
    return {keys["baseline"]: 100.0 - canary_percent, keys["canary"]: float(canary_percent)}


def fallback_split(spec: RolloutSpec) -> dict[str, float]:
    """Everything on the fallback version."""
    return {**dict.fromkeys(split(spec, 0.0), 0.0), fallback_key(spec): 100.0}


def check_spec(spec: RolloutSpec, rollout: str) -> None:
    """Raises SpecError where this spec cannot be rolled out under this name."""
    if spec.rollout != rollout:
        raise SpecError(f"the spec is of roll-out {spec.rollout!r}; name the same one in both places")
    missing = [arm for arm in ("baseline", "canary") if arm not in spec.arms]
    if missing:
        raise SpecError(f"arms: {' and '.join(missing)} missing; a roll-out has a baseline and a canary")
    keys = version_keys(spec.arms)
    if keys["baseline"] == keys["canary"]:
        raise SpecError(
            f"arms: baseline and canary are both {keys['canary']!r}; routers weigh versions, so give the"
            " canary one of its own"
        )
    if fallback_key(spec) == keys["canary"]:
        raise SpecError(
            f"fallback: {spec.fallback!r} is the canary itself; name a version that is known to work (G9)"
        )
    steps = spec.steps
    if any(later <= earlier for earlier, later in pairwise(steps)) or steps[0] <= 0:
        raise SpecError(
            f"steps: {', '.join(f'{step:g}' for step in steps)}: weights above 0 that rise are expected"
        )
