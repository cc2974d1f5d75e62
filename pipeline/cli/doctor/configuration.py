"""What is wrong with a configuration that can be read: times that do not fit, a policy."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.cli.doctor.findings import Finding
from pipeline.config import Config
from pipeline.core.divergence import KERNEL
from pipeline.policy_file import PolicyError, read_policy_file


def configuration_findings(config: Config) -> Iterator[Finding]:
    """Of the configuration alone. Reads the policy file: blocks."""
    yield from _times(config)
    if config.policy.file is not None:
        try:
            read_policy_file(config.policy.file)
        except PolicyError as error:
            yield _wrong("policy.file", str(error), f"klaxon policy check {config.policy.file}")
    if not config.kafka.transactions:
        yield Finding(
            severity="note",
            code="no_transactions",
            where="kafka.transactions",
            what="decisions are not one transaction: one gate process, and no promise after a crash",
            remedy="for more than a demo: Apache Kafka, and kafka.transactions: true",
        )


def installation_findings(kernel: str = KERNEL) -> Iterator[Finding]:
    """Of what is installed here; `kernel`: what scores pairs."""
    if kernel == "numpy":
        yield Finding(
            severity="note",
            code="no_kernel",
            where="this installation",
            what="pairs are scored by numpy, at a third of the speed, as no kernel of this version was"
            " compiled; gates that have it count nothing of what is made so",
            remedy="install a C compiler and Python's header files, then Klaxon again (make setup);"
            " the image has the kernel",
        )


def _times(config: Config) -> Iterator[Finding]:
    gate, lateness_s = config.gate, config.content.lateness_s
    if gate.renew_s * 2 > gate.lease_s:
        yield _wrong(
            "gate.renew_s",
            f"a lease of {gate.lease_s} s is renewed every {gate.renew_s} s: one late renewal ends it",
            f"set gate.renew_s to at most {gate.lease_s // 2 or 1}, or lengthen gate.lease_s",
        )
    if gate.dead_man_s < gate.lease_s:
        yield _wrong(
            "gate.dead_man_s",
            f"routers go back after {gate.dead_man_s} s, before a lease of {gate.lease_s} s ends",
            f"set gate.dead_man_s to {gate.lease_s} or more",
        )
    if gate.blind_after_s <= lateness_s + 2:
        yield _wrong(
            "gate.blind_after_s",
            f"{gate.blind_after_s} s: a second is complete {lateness_s + 1} s after its end at the soonest,"
            " so the gate is blind nearly always",
            f"set gate.blind_after_s to {lateness_s + 30}",
        )


def _wrong(where: str, what: str, remedy: str) -> Finding:
    return Finding(severity="error", code="configuration", where=where, what=what, remedy=remedy)
