"""A request as it arrived: what every exchange that comes of it shares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from agents.gateway.asking import Asked
from agents.gateway.consent import Consented, Consents
from agents.gateway.counts import Counts
from agents.gateway.events import Stated
from agents.gateway.segments import TokenEstimates, Traffic
from agents.gateway.settings import HeaderSettings
from agents.gateway.signature import PromptSigner


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request that is understood."""

    asked: Asked
    pair_id: str
    """The gateway's own id of it, 32 hex digits; engines never see it."""
    signature: str
    signature_key_id: str
    ts_us: int
    """By the wall clock."""
    at_us: int
    """By the monotonic clock."""
    key: bytes
    """What it is routed by: its session, else its user, else its own id."""
    traffic: Traffic
    session: str | None
    """Keyed hash; so is `tenant`."""
    tenant: str | None
    stated: Stated
    consented: Consented | None
    """None: no text of it leaves."""


class Arrivals:
    """Reads what a request and its headers say."""

    def __init__(
        self,
        names: HeaderSettings,
        signer: PromptSigner,
        consents: Consents,
        estimates: TokenEstimates,
        counts: Counts,
    ) -> None:
        self._names = names
        self._signer = signer
        self._consents = consents
        self._estimates = estimates
        self._counts = counts

    def of(self, asked: Asked, headers: Mapping[str, str], ts_us: int, at_us: int) -> Arrival | None:
        """None: no signature can be made of it, so nothing can be said of it."""
        signer, names = self._signer, self._names
        signature = signer.signature(asked.request_type, asked.texts, asked.sampling)
        if signature is None:
            return None
        pair_id = os.urandom(16).hex()
        session, tenant = headers.get(names.session), headers.get(names.tenant)
        user = asked.fields.get("user")
        subject = session or (user if isinstance(user, str) else None)
        return Arrival(
            asked=asked,
            pair_id=pair_id,
            signature=signature,
            signature_key_id=signer.key_id,
            ts_us=ts_us,
            at_us=at_us,
            key=(subject or pair_id).encode("utf-8", "surrogatepass"),
            traffic=self._estimates.traffic(
                asked.request_type, asked.temperature, asked.fields, len(asked.body)
            ),
            session=None if session is None else signer.hashed("session", session),
            tenant=None if tenant is None else signer.hashed("tenant", tenant),
            stated=Stated(
                headers.get(names.prompt_version),
                headers.get(names.data_version),
                headers.get(names.system_version),
                headers.get(names.prompt_id),
                headers.get(names.snapshot_id),
            ),
            consented=self._consented(headers.get(names.consent), subject, ts_us),
        )

    def _consented(self, header: str | None, subject: str | None, now_us: int) -> Consented | None:
        found = self._consents.check(header, subject, now_us)
        if isinstance(found, Consented):
            return found
        self._counts.texts[found.reason.value] += 1
        return None
