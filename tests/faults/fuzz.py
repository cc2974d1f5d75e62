"""Hostile bytes into every reader: `python -m tests.faults.fuzz --inputs N --seed S`.

Every input follows from (seed, its number), so a run can be cut into parts (`--first`) and one input played
again (`--only`). Each must be read without a crash, in bounded time, and keep what `readers` states. Prints
findings as they come, then one line per reader and the worst cost of a byte. Exit code 1 if there were any.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.faults.mutate import mutated
from tests.faults.readers import Reader, readers

FINDINGS_SHOWN: Final = 20
HANG_S: Final = 120
"""For 1,000 inputs, which take less than a second each by far: a process that hangs says where."""
FIXED_NS: Final = 250_000_000
PER_BYTE_NS: Final = 100_000
"""CPU time an input may take: generous, for machines that are busy; a cost that grows faster than the input
breaks it at some hundred kilobytes."""


@dataclass
class Tally:
    """What one reader made of its inputs."""

    inputs: int = 0
    accepted: int = 0
    """Inputs of which at least one event was accepted."""
    rejected: int = 0
    bytes: int = 0
    worst_ns: int = 0
    worst_number: int = -1


@dataclass
class Finding:
    """An input that broke something."""

    number: int
    reader: str
    value: bytes
    error: str


@dataclass
class Result:
    """A run."""

    tallies: dict[str, Tally]
    findings: list[Finding] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        """All of them."""
        return sum(tally.inputs for tally in self.tallies.values())


def inputs(seed: int, first: int, count: int, into: Mapping[str, Reader]) -> Iterator[tuple[int, str, bytes]]:
    """(number, reader, bytes), each a function of seed and number alone."""
    names = sorted(into)
    pools = {name: tuple(into[name].examples) for name in names}
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{number}")
        name = names[number % len(names)]
        yield number, name, mutated(rng, rng.choice(pools[name]), pools[name])


def fuzz(
    seed: int, first: int, count: int, *, bounded: bool = False, until_found: bool = False, only: str = ""
) -> Result:
    """Feed them. `bounded`: too much CPU time for its size is a finding, too; `only`: readers named so."""
    into = {name: reader for name, reader in readers().items() if only in name}
    result = Result({name: Tally() for name in into})
    for number, name, value in inputs(seed, first, count, into):
        if bounded and number % 1000 == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        tally = result.tallies[name]
        began_ns = time.process_time_ns()
        try:
            accepted, _ = into[name].read(value)
        except Exception:  # whatever it is, it would have ended a worker
            result.findings.append(Finding(number, name, value, traceback.format_exc()))
            accepted = 0
        spent_ns = time.process_time_ns() - began_ns
        tally.inputs += 1
        tally.bytes += len(value)
        tally.accepted += accepted > 0
        tally.rejected += accepted == 0
        if spent_ns / (len(value) + 2_000) > tally.worst_ns:
            tally.worst_ns, tally.worst_number = int(spent_ns / (len(value) + 2_000)), number
        if bounded and spent_ns > FIXED_NS + PER_BYTE_NS * len(value):
            error = f"{spent_ns / 1e6:.0f} ms of CPU time for {len(value)} bytes"
            result.findings.append(Finding(number, name, value, error))
        if until_found and result.findings:
            break
    if bounded:
        faulthandler.cancel_dump_traceback_later()
    return result


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first input: go on where it ended"
    )
    parser.add_argument("--only", type=int, help="play this one input and show it")
    arguments = parser.parse_args()
    if arguments.only is not None:
        arguments.first, arguments.inputs = arguments.only, 1
    began_s = time.monotonic()
    result = fuzz(arguments.seed, arguments.first, arguments.inputs, bounded=True)
    for finding in result.findings[:FINDINGS_SHOWN]:
        print(f"--- input {finding.number} of seed {arguments.seed} into {finding.reader}:")
        print(base64.b64encode(finding.value[:2_000]).decode())
        print(finding.error)
    for name, tally in sorted(result.tallies.items()):
        print(
            f"{name:24} {tally.inputs:8} inputs {tally.bytes / 1e6:8.1f} MB  accepted {tally.accepted:7}  "
            f"refused {tally.rejected:7}  "
            f"worst {tally.worst_ns / 1000:.1f} µs a byte (input {tally.worst_number})"
        )
    took_s = time.monotonic() - began_s
    last = arguments.first + arguments.inputs - 1
    print(f"seed {arguments.seed} inputs {arguments.first}..{last}, {result.inputs / took_s:.0f} a second")
    print(f"fuzz inputs {result.inputs} findings {len(result.findings)}")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
