"""Request events of several records side by side: what they say of themselves, and the cells they claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.cells import ALL, CONTEXT_LIMITS, UNKNOWN, context_class
from pipeline.core.evidence import Dimension
from pipeline.core.texts import Texts, digests, joined
from schemas.buckets import Population
from schemas.columns import ABSENT, F8, I8, NO_LABEL, U1, Bool, RequestColumns
from schemas.events import ARMS

_SERVER_ERROR: Final = 500
_NAMED_BYTES: Final = 40
_ANONYMOUS_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Requests:
    """n request events, one record after the other; arrays have length n, names as in RequestColumns."""

    signature: U1
    pair_id: U1
    has_pair_id: Bool
    arm: I8
    generation: I8
    ts_us: I8
    duration_us: I8
    ttft_us: I8
    itl_us: I8
    input_tokens: I8
    output_tokens: I8
    cached_tokens: I8
    temperature: F8
    shadow: Bool
    failed: Bool
    """Ended with a server's error, or names an error."""
    rollout: Texts
    model_version: Texts
    node: Texts
    request_type: Texts
    hardware: Texts
    region: Texts

    def only(self, rows: I8) -> Requests:
        """Those at these rows, ascending."""
        if len(rows) == len(self.arm):
            return self
        return Requests(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def keys(self) -> list[bytes]:
        """What makes two events the same: (pair id, arm), else (signature, arm, node, time); per roll-out."""
        rollouts = digests(self.rollout)
        named = np.zeros((len(self.arm), _NAMED_BYTES), dtype=np.uint8)
        named[:, :16], named[:, 16:32], named[:, 32] = rollouts, self.pair_id, self.arm
        keys: list[bytes] = named.view(f"V{_NAMED_BYTES}").ravel().tolist()
        rest = np.flatnonzero(~self.has_pair_id)
        if len(rest):
            anonymous = np.zeros((len(rest), _ANONYMOUS_BYTES), dtype=np.uint8)
            anonymous[:, :16], anonymous[:, 16:32] = rollouts[rest], self.signature[rest]
            anonymous[:, 32:48], anonymous[:, 48] = digests(self.node)[rest], self.arm[rest]
            anonymous[:, 56:] = self.ts_us[rest, None].view(np.uint8)
            for row, key in zip(
                rest.tolist(), anonymous.view(f"V{_ANONYMOUS_BYTES}").ravel().tolist(), strict=True
            ):
                keys[row] = key
        return keys

    def populations(self) -> tuple[list[Population | None], I8]:
        """Populations of the events by what they say themselves, and each event's index into them."""
        generations, generation = np.unique(self.generation, return_inverse=True)
        combined = self.rollout.codes * len(self.model_version.values) + self.model_version.codes
        combined = (combined * len(ARMS) + self.arm) * len(generations) + generation
        _, first, codes = np.unique(combined, return_index=True, return_inverse=True)
        populations: list[Population | None] = [
            Population(
                self.rollout.values[self.rollout.codes[row]],
                ev.or_none(int(self.generation[row])),
                ARMS[self.arm[row]],
                self.model_version.values[self.model_version.codes[row]],
            )
            for row in first.tolist()
        ]
        return populations, codes

    def dimensions(self, full: Bool) -> list[Dimension]:
        """Cells, in the order in which one request claims them; all but the first of `full` ones only."""
        node = ev.texts("node", self.node)
        request_type = ev.texts("request_type", self.request_type)
        hardware = ev.texts("hardware", self.hardware)
        sampling = ev.sampling(self.temperature)
        region = ev.texts("region", self.region)
        traffic = Dimension("traffic", ("user", "shadow"), self.shadow.astype(np.int64))
        nested, node_nested = ev.contexts(self.input_tokens, node)
        stratum = ev.crossed(
            "stratum", (request_type, self._context(), sampling, self._cache_hit(), hardware)
        )
        parts = (node, *nested, request_type, hardware, sampling, region, traffic, *node_nested, stratum)
        return [ev.constant(ALL, "", len(full)), *(ev.members(part, full) for part in parts)]

    def _context(self) -> Dimension:
        """The exclusive context classes."""
        values = tuple(context_class(limit) for limit in (*CONTEXT_LIMITS, CONTEXT_LIMITS[-1] + 1))
        codes = np.searchsorted(np.array(CONTEXT_LIMITS), self.input_tokens, side="left")
        return Dimension("context_class", values, codes)

    def _cache_hit(self) -> Dimension:
        """Cached share of the input: none 0, part < ½, most, unknown where nothing is said."""
        codes = np.where(2 * self.cached_tokens < self.input_tokens, 1, 2)
        codes = np.where(self.cached_tokens == 0, 0, codes)
        codes = np.where(self.cached_tokens == ABSENT, 3, codes)
        return Dimension("cache_hit", ("none", "part", "most", UNKNOWN), codes)


def requests_of(records: Sequence[RequestColumns]) -> Requests:
    """The events of these records, in order."""

    def column(name: str) -> Any:
        parts = [getattr(record, name) for record in records]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def wide(name: str) -> I8:
        values: I8 = column(name).astype(np.int64)
        return values

    def texts(name: str) -> Texts:
        return joined([record.labels[name] for record in records])

    errors = np.concatenate([record.labels["error"].codes for record in records])
    return Requests(
        signature=column("signature"),
        pair_id=column("pair_id"),
        has_pair_id=column("has_pair_id"),
        arm=wide("arm"),
        generation=wide("generation"),
        ts_us=wide("ts_us"),
        duration_us=wide("duration_us"),
        ttft_us=wide("ttft_us"),
        itl_us=wide("itl_us"),
        input_tokens=wide("input_tokens"),
        output_tokens=wide("output_tokens"),
        cached_tokens=wide("cached_tokens"),
        temperature=column("temperature"),
        shadow=column("shadow"),
        failed=(column("status") >= _SERVER_ERROR) | (errors != NO_LABEL),
        rollout=texts("rollout"),
        model_version=texts("model_version"),
        node=texts("node"),
        request_type=texts("request_type"),
        hardware=texts("hardware"),
        region=texts("region"),
    )
