"""Commands and roll-out specs as they are read: their own types, and what must hold between fields."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.columns import I8, MISSING, Rejected
from schemas.control import Command, RolloutSpec
from schemas.json_codec import EventReader, explain

_SPEC: Final = "arguments.spec"


def spec_fault(spec: RolloutSpec) -> Rejected | None:
    """What is wrong between the fields of a spec (field dotted, position 0), or None.

    Both a baseline and a canary arm are needed, and the steps must ascend.
    """
    for arm in ("baseline", "canary"):
        if arm not in spec.arms:
            return Rejected(0, f"arms.{arm}", "this arm is missing; a canary is compared with a baseline")
    for earlier, later in zip(spec.steps, spec.steps[1:], strict=False):
        if later <= earlier:
            return Rejected(0, "steps", f"steps must ascend; {later:g} stands after {earlier:g}")
    return None


def command_fault(command: Command) -> Rejected | None:
    """What is wrong with a command's arguments (position 0), or None: `start` carries a whole spec."""
    if command.command != "start":
        return None
    if "spec" not in command.arguments:
        return Rejected(0, _SPEC, MISSING)
    try:
        spec = msgspec.convert(command.arguments["spec"], RolloutSpec)
    except msgspec.ValidationError as error:
        fault = explain(0, error, "")
    else:
        found = spec_fault(spec)
        if found is None:
            return None
        fault = found
    return Rejected(0, f"{_SPEC}.{fault.field}".rstrip("."), fault.reason, fault.kind)


class CommandReader:
    """Reads JSON records of commands."""

    def __init__(self) -> None:
        self._reader = EventReader(Command)

    def read(self, value: bytes) -> tuple[list[Command], I8, list[Rejected]]:
        """Commands, their positions in the record, and what was refused. Never raises on content."""
        commands, positions, rejected = self._reader.read(value)
        faults = [command_fault(command) for command in commands]
        for position, fault in zip(positions.tolist(), faults, strict=True):
            if fault is not None:
                rejected.append(Rejected(position, fault.field, fault.reason, fault.kind))
        keep = [fault is None for fault in faults]
        rejected.sort(key=lambda r: -1 if r.position is None else r.position)
        return [c for c, ok in zip(commands, keep, strict=True) if ok], positions[keep], rejected


COMMANDS: Final = CommandReader()
