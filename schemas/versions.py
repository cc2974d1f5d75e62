"""How directives name what runs on an arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from schemas.events import Arm

DIMENSIONS: Final = ("model_version", "prompt_version", "data_version", "system_version")
"""In the order of the bits of `Population.differs`."""


class Versions(Protocol):
    """What runs on an arm: the four dimensions."""

    @property
    def model_version(self) -> str: ...
    @property
    def prompt_version(self) -> str | None: ...
    @property
    def data_version(self) -> str | None: ...
    @property
    def system_version(self) -> str | None: ...


def version_keys(arms: Mapping[Arm, Versions]) -> Mapping[Arm, str]:
    """Arm → its version as directives write it: model version, `/value` per other dimension that differs."""
    differing = [name for name in DIMENSIONS[1:] if len({getattr(arm, name) for arm in arms.values()}) > 1]
    return {
        name: "/".join((arm.model_version, *(getattr(arm, dimension) or "none" for dimension in differing)))
        for name, arm in arms.items()
    }
