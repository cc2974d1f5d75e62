"""Workers of another release beside ours: `python -m tests.faults.upgrade WAY KIND` is one of them.

`later`: it reads record version 2 as well, in topics of our own and in columnar envelopes. `trusting`: a
defect, it takes buckets whatever settings they were made with. Besides that it is the worker as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from pipeline.core.gate import sources
from schemas import columnar_codec, records


def later() -> None:
    """The release that wrote version 2, whose records happen to look like ours."""
    records.READ_VERSIONS = frozenset({1, 2})  # type: ignore[misc]
    check_head = columnar_codec._check_head

    def check_either(envelope: Any, kind: str) -> None:
        check_head(msgspec.structs.replace(envelope, v=1) if envelope.v == 2 else envelope, kind)

    columnar_codec._check_head = check_either


def trusting() -> None:
    """What was made with other settings is judged together with what was not."""
    state_final, state_fresh = sources.Source.state_final, sources.Source.state_fresh

    def final(self: sources.Source, final: Any, folded: int) -> sources.Change:
        return state_final(self, msgspec.structs.replace(final, settings_hash=self.settings_hash), folded)

    def fresh(self: sources.Source, fresh: Any, folded: int) -> sources.Change:
        return state_fresh(self, msgspec.structs.replace(fresh, settings_hash=self.settings_hash), folded)

    sources.Source.state_final = final  # type: ignore[method-assign]
    sources.Source.state_fresh = fresh  # type: ignore[method-assign]


WAYS: Final[dict[str, Callable[[], None]]] = {"later": later, "trusting": trusting}


def command(way: str, kind: str) -> tuple[str, ...]:
    """How a test starts it."""
    return (sys.executable, "-m", "tests.faults.upgrade", way, kind)


def of_version_2(value: bytes) -> bytes:
    """A msgpack record of ours as the later release writes it."""
    head, *rest = msgspec.msgpack.decode(value)
    assert head == 1
    return msgspec.msgpack.encode([2, *rest])


def main() -> None:
    """Be that worker."""
    way, kind = sys.argv[1:]
    WAYS[way]()
    from pipeline.cli.main import main as klaxon

    sys.argv = ["klaxon", "worker", kind]
    klaxon()


if __name__ == "__main__":
    main()
