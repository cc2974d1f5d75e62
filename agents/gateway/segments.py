"""Classes of traffic as directives exclude them, and what a request's are before it is answered. Pure."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from agents.gateway.settings import PoolSettings
from schemas.control import Segment

Sampling = Literal["greedy", "sampled", "unknown"]

UNKNOWN: Final = "unknown"
"""What cells call a label that an event does not state."""
_OVER: Final = re.compile(r"^>(\d{1,9})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A request's classes. Its input tokens are not known before an engine counts them: a bound is."""

    request_type: str
    """`chat` or `completion`, as its events will say."""
    sampling: Sampling
    model: str
    body_bytes: int
    most_tokens: int
    """Input tokens that it surely, or nearly so, does not exceed (TokenEstimates)."""


UNBOUNDED_TOKENS: Final = 2**31 - 1
"""Bound of a request that is more than its bytes: with pictures, sound or files, perhaps by address only."""


def sampling_class(temperature: float | None) -> Sampling:
    """As cells tell it: greedy is temperature 0."""
    if temperature is None:
        return "unknown"
    return "greedy" if temperature == 0 else "sampled"


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Excluded segments as a request is held against them.

    What cannot be known of a request counts as inside, and a segment that nobody here understands contains
    every request: the version under test then gets nothing, which is never wrong for a user.
    """

    over: int | None = None
    """Requests of more input tokens are excluded; None: no length is."""
    nodes: frozenset[str] = frozenset()
    over_on: Mapping[str, int] = field(default_factory=dict)
    """Node → the same of requests to it."""
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Dimension (request_type, sampling, hardware, region) → its excluded values."""
    not_understood: int = 0
    """Segments of dimensions or values that are none of these."""

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Exclusions:
        """Of a directive."""
        over: dict[str | None, int] = {}
        nodes: set[str] = set()
        values: dict[str, set[str]] = {
            "request_type": set(),
            "sampling": set(),
            "hardware": set(),
            "region": set(),
        }
        not_understood = 0
        for segment in segments:
            place = _place_of(segment)
            if place is not None:
                node, limit = place
                over[node] = min(limit, over.get(node, limit))
            elif segment.dimension == "node":
                nodes.add(segment.value)
            elif segment.dimension in values:
                values[segment.dimension].add(segment.value)
            else:
                not_understood += 1
        return cls(
            over=over.pop(None, None),
            nodes=frozenset(nodes),
            over_on={node: limit for node, limit in over.items() if node is not None},
            values={dimension: frozenset(held) for dimension, held in values.items() if held},
            not_understood=not_understood,
        )

    @property
    def by_node(self) -> bool:
        """Whether any of them is of single engines."""
        return bool(self.nodes or self.over_on)

    def hold(self, traffic: Traffic | None, pool: PoolSettings) -> bool:
        """Whether a request is excluded on every engine of a pool. `traffic` None: nothing is known of it."""
        if self.not_understood or _is_over(traffic, self.over):
            return True
        if not self.values:
            return False
        known = {"hardware": pool.hardware or UNKNOWN, "region": pool.region or UNKNOWN}
        if traffic is not None:
            known |= {"request_type": traffic.request_type or UNKNOWN, "sampling": traffic.sampling}
        return any(known.get(dimension) in {None, *held} for dimension, held in self.values.items())

    def hold_on(self, traffic: Traffic | None, node: str) -> bool:
        """Whether a request is excluded on this engine, that it is not on all."""
        return node in self.nodes or _is_over(traffic, self.over_on.get(node))


NO_EXCLUSIONS: Final = Exclusions()


def _is_over(traffic: Traffic | None, limit: int | None) -> bool:
    return limit is not None and (traffic is None or traffic.most_tokens > limit)


def _place_of(segment: Segment) -> tuple[str | None, int] | None:
    """Node (None: every one) and context limit of a segment of lengths; None: it is another kind."""
    node, _, nested = segment.value.rpartition("|")
    over = _OVER.match(nested)
    if over is None:
        return None
    if segment.dimension == "context" and not node and nested == segment.value:
        return None, int(over[1])
    if segment.dimension == "node_context" and node:
        return node, int(over[1])
    return None


_FIRST: Final = 1 / 64
_RATIO: Final = 1.05
_EDGES: Final = tuple(_FIRST * _RATIO**at for at in range(114))
"""Upper edges of the bins of density (input tokens per byte), 1/64 to 3.9; one bin more is above them."""
_LEARNED_FROM: Final = 256
"""Bytes of a body at least: of shorter ones the template's tokens would be taken for the text's."""
_TEMPLATE_TOKENS: Final = 256
"""What a chat template may add to a request."""
_ENOUGH: Final = 100
_KEPT: Final = 1_024
"""At this many requests counts are halved: what was served lately weighs more."""
_DENSITY: Final = 0.25
_OUTPUT_TOKENS: Final = 256
"""What is expected of a model of which nothing is known."""
_OUTPUT_WEIGHT: Final = 1 / 32
_MOST_MODELS: Final = 64
_NAME_CHARACTERS: Final = 256
_FORGET_AFTER_US: Final = 3_600_000_000
_SOUND_TOKENS: Final = 1 << 24


@dataclass(slots=True)
class _Model:
    """What requests to one model took."""

    used_us: int
    bins: list[int] = field(default_factory=lambda: [0] * (len(_EDGES) + 1))
    requests: int = 0
    densest: int | None = None
    """The bin that 99 of 100 requests do not exceed; None: to be found again."""
    tokens: float = 0.0
    bytes: float = 0.0
    output_tokens: float = _OUTPUT_TOKENS


class TokenEstimates:
    """Input tokens of a request by the bytes of its body, learned per model from what engines count.

    Bounded: 64 models, 115 counts each; the one used longest ago goes first, and any after an hour. Until 100
    requests are known a byte counts as a token, to which comes what a chat template adds.
    """

    def __init__(self) -> None:
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def traffic(
        self, request_type: str, temperature: float | None, fields: Mapping[str, object], body_bytes: int
    ) -> Traffic:
        """Classes of a request: `fields` are those of its body. Fields of a wrong type are as if absent."""
        model = fields.get("model")
        name = model[:_NAME_CHARACTERS] if isinstance(model, str) else ""
        most = UNBOUNDED_TOKENS if _holds_more(fields) else self._most_tokens(name, body_bytes)
        return Traffic(request_type, sampling_class(temperature), name, body_bytes, most)

    def learn(self, traffic: Traffic, input_tokens: int, output_tokens: int, mono_us: int) -> None:
        """An engine's counts of one request. Those that none can have (below 1, over 2²⁴) teach nothing."""
        if not (0 < input_tokens <= _SOUND_TOKENS and 0 <= output_tokens <= _SOUND_TOKENS):
            return
        known = self._touch(traffic.model, mono_us)
        known.output_tokens += (output_tokens - known.output_tokens) * _OUTPUT_WEIGHT
        if traffic.body_bytes < _LEARNED_FROM or traffic.most_tokens == UNBOUNDED_TOKENS:
            return
        known.bins[bisect_left(_EDGES, input_tokens / traffic.body_bytes)] += 1
        known.requests += 1
        known.tokens += input_tokens
        known.bytes += traffic.body_bytes
        known.densest = None
        if known.requests >= _KEPT:
            known.bins = [count // 2 for count in known.bins]
            known.requests = sum(known.bins)
            known.tokens /= 2
            known.bytes /= 2

    def expected_tokens(self, traffic: Traffic, max_tokens: int | None) -> int:
        """Input and output tokens of one copy, on average and at least 1: what a budget is promised."""
        known = self._models.get(traffic.model)
        density = _DENSITY if known is None or known.bytes == 0 else known.tokens / known.bytes
        output = _OUTPUT_TOKENS if known is None else known.output_tokens
        if max_tokens is not None:
            output = min(output, max(max_tokens, 0))
        return max(1, round(traffic.body_bytes * density + output))

    def gauges(self) -> dict[str, int]:
        """Models known."""
        return {"token_estimate_models": len(self._models)}

    def _most_tokens(self, model: str, body_bytes: int) -> int:
        """What 99 of 100 requests of this many bytes do not exceed."""
        known = self._models.get(model)
        counted = max(body_bytes, _LEARNED_FROM)
        if known is None or known.requests < _ENOUGH:
            return counted + _TEMPLATE_TOKENS
        if known.densest is None:
            known.densest = _densest(known.bins, known.requests)
        if known.densest == len(_EDGES):
            return UNBOUNDED_TOKENS
        return math.ceil(counted * _EDGES[known.densest])

    def _touch(self, model: str, mono_us: int) -> _Model:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Model(mono_us)
        known.used_us = max(known.used_us, mono_us)
        self._models.move_to_end(model)
        while len(self._models) > 1:
            oldest, least = next(iter(self._models.items()))
            if len(self._models) <= _MOST_MODELS and mono_us - least.used_us < _FORGET_AFTER_US:
                break
            del self._models[oldest]
        return known


def _densest(bins: Sequence[int], requests: int) -> int:
    """The lowest bin above which at most one request in a hundred lies."""
    above = 0
    for at in range(len(bins) - 1, 0, -1):
        above += bins[at]
        if above * 100 > requests:
            return at
    return 0


def _holds_more(fields: Mapping[str, object]) -> bool:
    """Whether a chat holds parts that are no text."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(
        not isinstance(part, dict) or part.get("type") != "text"
        for content in contents
        if isinstance(content, list)
        for part in content
    )
