"""What a gate signs with, whose commands it obeys, and which directives on its topic it believes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from pipeline.config import SignaturesConfig
from pipeline.key_file import WatchedKey
from pipeline.signatures import NOT_REQUIRED, key_for, trust_for
from pipeline.trust_file import WatchedTrust
from pipeline.workers.records import Record
from schemas.control import Command
from schemas.plain import Log, Plain
from schemas.signing import SIGNATURE, USE_OF, Signer, Use, Verdict, signer_of
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.gate")

EXPIRED: Final = "expired"
"""A command that is too old, or not made yet."""
AHEAD_US: Final = 300_000_000
"""How far an operator's clock may be ahead."""
WARN_S: Final = 14 * 86_400
"""A key that ends sooner is spoken of at the start."""
REASONS: Final = (EXPIRED, *(verdict.value for verdict in Verdict if verdict is not Verdict.TRUSTED))


class GateSignatures:
    """One for all seats of a process. Counts are kept for as long as it runs."""

    def __init__(self, key: WatchedKey | None, trust: WatchedTrust | None, command_age_us: int) -> None:
        """`key` None: nothing is signed. `trust` None: signatures are not required."""
        self._key = key
        self._trust = trust
        self._command_age_us = command_age_us
        self._commands: Counter[str] = Counter()
        self._directives: Counter[str] = Counter()

    @classmethod
    def of(cls, config: SignaturesConfig) -> GateSignatures:
        """As configured. Raises PipelineError for keys that are missing or wrong. Blocks."""
        trust = trust_for(config)
        return cls(key_for(config, Use.DIRECTIVES), trust, config.command_age_s * 1_000_000)

    def announce(self) -> None:
        """Say what holds, where it is not the rule, and when the key that signs ends soon."""
        if self._trust is None:
            log.warning("%s", Plain(NOT_REQUIRED))
        if self._key is not None and 0 <= (left_s := self.key_valid_s()) < WARN_S:
            log.warning(
                "%s, which signs directives, ends in %d hours: `klaxon keys rotate directives`",
                Plain(self._key.signer.key_id),
                left_s // 3600,
            )

    def key_valid_s(self) -> int:
        """How long readers believe the key that signs, 0 if they do not; −1: without end, or none need to."""
        if self._trust is None or self.signer is None:
            return -1
        now_us = time.time_ns() // 1000
        if not self._may_sign(self.signer, now_us):
            return 0
        end_us = self._trust.trust.keys[self.signer.key_id].valid_until_us
        return -1 if end_us is None else (end_us - now_us) // 1_000_000

    @property
    def signer(self) -> Signer | None:
        """What signs now."""
        return None if self._key is None else self._key.signer

    def poll(self, now_s: float) -> None:
        """Look whether key and trust file are others now, at most once a second. May read a file."""
        if self._trust is not None:
            self._trust.poll(now_s)
        if self._key is not None:
            self._key.poll(now_s, lambda signer: self._may_sign(signer, time.time_ns() // 1000))

    def headers(self, topic: Topic, key: bytes, value: bytes) -> list[tuple[str, bytes]]:
        """The header that signs a record of this topic, where its records are signed."""
        signer = self.signer
        return [signer.header(topic.value, key, value)] if topic in USE_OF and signer is not None else []

    def command_fault(self, record: Record, now_us: int) -> str | None:
        """Why a record of commands is not obeyed, counted; None if it may be."""
        verdict = self._judge(Topic.COMMANDS, record.key, record.value, record.headers, now_us)
        if verdict is Verdict.TRUSTED:
            return None
        self._commands[verdict.value] += 1
        return f"{verdict.value.replace('_', ' ')}: not obeyed; see signatures in docs/security.md"

    def age_fault(self, command: Command, now_us: int) -> str | None:
        """Why a command is too old to be obeyed, counted; None if it is not.

        The gate remembers only so many ids: what it may have forgotten must not come again.
        """
        age_us = now_us - command.ts_us
        if self._trust is None or -AHEAD_US <= age_us <= self._command_age_us:
            return None
        self._commands[EXPIRED] += 1
        if age_us < 0:
            return f"over {AHEAD_US // 1_000_000} s from now: not obeyed; set the clock of who sent it"
        limit_s = self._command_age_us // 1_000_000
        return f"over {limit_s} s (signatures.command_age_s) ago: not obeyed; send it again"

    def believes(
        self, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes], now_us: int
    ) -> bool:
        """Whether a record of the control topic was signed by a gate; counted if not."""
        verdict = self._judge(Topic.CONTROL, key, value, headers, now_us)
        if verdict is not Verdict.TRUSTED:
            self._directives[verdict.value] += 1
        return verdict is Verdict.TRUSTED

    def trusts(
        self, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes], now_us: int
    ) -> bool:
        """The same, not counted."""
        return self._judge(Topic.CONTROL, key, value, headers, now_us) is Verdict.TRUSTED

    def is_current(self, headers: Mapping[str, bytes]) -> bool:
        """Whether a record names the key that signs now; a directive that does not is written anew."""
        return self.signer is None or signer_of(headers.get(SIGNATURE)) == self.signer.key_id

    def gauges(self) -> dict[str, dict[str, int]]:
        """Records that were refused, by thing and reason."""
        found = {"refused/command": self._commands, "refused/directive": self._directives}
        return {thing: {reason: counts[reason] for reason in REASONS} for thing, counts in found.items()}

    def _may_sign(self, signer: Signer, now_us: int) -> bool:
        """Whether readers with our trust file would believe a directive of this key."""
        found = None if self._trust is None else self._trust.trust.keys.get(signer.key_id)
        if found is None:
            return self._trust is None
        return Use.DIRECTIVES in found.signs and found.is_valid(now_us)

    def _judge(
        self, topic: Topic, key: bytes | None, value: bytes | None, headers: Mapping[str, bytes], now_us: int
    ) -> Verdict:
        if self._trust is None:
            return Verdict.TRUSTED
        return self._trust.check(topic, key, value, headers.get(SIGNATURE), now_us)


UNSIGNED: Final = GateSignatures(None, None, 0)
"""Nothing is signed, nothing required."""
