"""What an exchange says to the pipeline: a request event, and a logit event where it was mirrored. Pure.

Only what is meant to leave does: labels of the configuration and of headers named there, numbers of the
request, keyed hashes of session and tenant, pseudonyms of tokens. Never a text, nor what an engine or a
client called something: an error is one of ERRORS, a finish reason one of FINISHES.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

from agents.gateway.asking import Asked
from agents.gateway.capture import Captured
from agents.gateway.facts import DEFINITIONS, EngineFacts
from agents.gateway.forced import FORCED_DEFINITION
from agents.gateway.lists import IdLists, Told, decimals_of, lists_of
from agents.gateway.pseudonyms import Pseudonyms
from agents.gateway.routing import Route
from schemas.answers.positions import Position
from schemas.events import (
    ARMS,
    MAX_POSITIONS,
    Arm,
    Definition,
    EncryptedText,
    Kind,
    LogitEvent,
    RequestEvent,
    Source,
)

N = TypeVar("N", int, float)

ERRORS: Final = frozenset(
    {
        "timeout",
        "connect",
        "cut",
        "refused",
        "overload",
        "oom",
        "garbled",
        "engine",
        "client",
        "stopped",
        "defect",
    }
)
"""Classes of errors (docs/events.md); anything else is `other`."""
FINISHES: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "eos_token", "stop_sequence", "abort",
     "error", "repetition"}
)  # fmt: skip
"""Finish reasons of the engines that are read; anything else is `other`."""
OTHER: Final = "other"
BYTES_PER_TOKEN: Final = 4
"""How a prompt's tokens are guessed where nobody counted them."""

_DAY_US: Final = 86_400_000_000
_YEAR_2100_US: Final = 4_102_444_800_000_000
_MOST_TOKENS: Final = 2**31 - 1
_MOST_CHARS: Final = 256
_MOST_DIMENSIONS: Final = 4096


@dataclass(frozen=True, slots=True)
class Stated:
    """Labels that the request's headers stated, where the configuration reads them."""

    prompt_version: str | None = None
    data_version: str | None = None
    system_version: str | None = None
    prompt_id: str | None = None
    snapshot_id: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what one engine answered: the user's, or a copy's."""

    rollout: str
    route: Route
    asked: Asked
    signature: str
    """Of PromptSigner."""
    signature_key_id: str
    pair_id: str
    """The gateway's id of the request, equal on all arms."""
    ts_us: int
    """Arrival at the gateway, by the wall clock."""
    duration_us: int
    """From there to the last byte, by the monotonic clock; so is `ttft_us`."""
    ttft_us: int | None
    status: int
    """HTTP; 0: no answer at all."""
    error: str | None
    """The class of what went wrong on the way to the engine; None: whatever `captured` says."""
    shadow: bool
    captured: Captured | None
    """None: nothing was answered that could be read."""
    expected_arms: tuple[Arm, ...] = ()
    """Arms that answer this request; empty: not mirrored."""
    source: Source = "generated"
    session: str | None = None
    """Keyed hash, of PromptSigner; so is `tenant`."""
    tenant: str | None = None
    stated: Stated = Stated()
    facts: EngineFacts | None = None
    top: int = 5
    """Candidates a position that leave."""


class NoLogits(StrEnum):
    """Why there is no logit event of a mirrored answer; counted by their values."""

    NO_ANSWER = "no_answer"
    NO_POSITIONS = "no_positions"
    """Nothing that could be compared is listed anywhere."""
    NO_TOKEN_IDENTITY = "no_token_identity"  # noqa: S105
    """Tokens come with neither ids nor bytes."""
    NOT_MIRRORED = "not_mirrored"


def request_event(
    exchange: Exchange,
    sealed: EncryptedText | None = None,
    consent_id: str | None = None,
    embedding: tuple[float, ...] | None = None,
) -> RequestEvent:
    """Latency, outcome and labels; one per exchange. Valid whatever was captured. Never raises.

    `sealed` and `consent_id` only where the user consented.
    """
    captured = exchange.captured or Captured()
    finish = captured.finish_reason
    return RequestEvent(
        v=1,
        **_labels(exchange, captured),
        key_ids=exchange.signature_key_id,
        shadow=exchange.shadow,
        status=_within(exchange.status, 0, 999) or 0,
        error=_one_of(ERRORS, exchange.error or captured.error),
        ttft_us=None if exchange.ttft_us is None else _duration(exchange.ttft_us),
        output_tokens=_tokens(captured.output_tokens) or 0,
        # Several answers share a stream; copies, which this is held against, are of one.
        itl_us=_between_tokens(captured) if exchange.asked.choices == 1 else None,
        finish_reason=_one_of(FINISHES, finish),
        stream=exchange.asked.stream,
        session=_label(exchange.session),
        prompt_id=_label(exchange.stated.prompt_id),
        snapshot_id=_label(exchange.stated.snapshot_id),
        embedding=_vector(embedding),
        consent_id=_label(consent_id),
        text=sealed,
    )


def logit_event(exchange: Exchange, pseudonyms: Pseudonyms) -> LogitEvent | NoLogits:
    """What the answer's positions say, or why they say nothing. Never raises.

    Positions past 65,535 are left out, and then `ended` is not known; the publisher cuts what no record
    holds.
    """
    captured = exchange.captured
    if not exchange.expected_arms:
        return NoLogits.NOT_MIRRORED
    if captured is None or captured.answer is None:
        unnamed = captured is not None and captured.skipped == "no_token_identity"
        return NoLogits.NO_TOKEN_IDENTITY if unnamed else NoLogits.NO_ANSWER
    whole = captured.answer.generated
    positions = whole[:MAX_POSITIONS]
    facts = exchange.facts
    # A prompt's tokens are scored in log-probabilities whatever the engine writes its own with.
    logits = facts is not None and facts.logits and exchange.source == "generated"
    kind: Kind = "logits" if logits else "logprobs"
    told = Told(exchange.top, ARMS.index(exchange.route.arm), normalised=kind == "logprobs")
    lists = lists_of(positions, told, pseudonyms.of(exchange.pair_id))
    if lists is None:
        return _why_not(positions)
    named: dict[str, Any] = (
        {"tokens": lists.tokens, "top_ids": lists.top_ids}
        if isinstance(lists, IdLists)
        else {"token_bytes": lists.token_bytes, "top_bytes": lists.top_bytes}
    )
    precision = exchange.route.pool.precision
    return LogitEvent(
        v=1,
        **_labels(exchange, captured),
        **named,
        key_ids=f"{exchange.signature_key_id},{pseudonyms.key_id}",
        expected_arms=tuple(arm for arm in ARMS if arm in exchange.expected_arms),
        definition=definition_of(exchange),
        source=exchange.source,
        kind=kind,
        precision=decimals_of(lists.top_logprobs) if precision is None else precision,
        top_logprobs=lists.top_logprobs,
        ended=captured.ended if len(positions) == len(whole) else None,
    )


def definition_of(exchange: Exchange) -> Definition:
    """What its log-probabilities are. At temperature 1 scaling changes nothing, so they are raw.

    SGLang and TGI answer greedy requests unscaled: raw as well. Prompts are always scored raw.
    """
    if exchange.source == "forced":
        return FORCED_DEFINITION
    pool, facts = exchange.route.pool, exchange.facts
    stated = pool.definition or (facts.definition if facts is not None else None) or DEFINITIONS[pool.kind]
    temperature = exchange.asked.temperature
    if temperature == 0 and pool.kind in ("sglang", "tgi") and stated == DEFINITIONS[pool.kind]:
        return "raw"
    return "raw" if stated == "temperature" and temperature == 1 else stated


def _labels(exchange: Exchange, captured: Captured) -> dict[str, Any]:
    """The labels of both events."""
    pool, asked, stated = exchange.route.pool, exchange.asked, exchange.stated
    facts = exchange.facts
    return {
        "rollout": exchange.rollout,
        "generation": exchange.route.generation,
        "arm": exchange.route.arm,
        "pair_id": exchange.pair_id,
        "signature": exchange.signature,
        "ts_us": min(max(exchange.ts_us, 0), _YEAR_2100_US),
        "duration_us": _duration(exchange.duration_us),
        "node": exchange.route.engine.node,
        "input_tokens": _input_tokens(asked, captured),
        # Not what the client or the engine's answer calls it: either may say anything.
        "model_name": pool.model_name or (None if facts is None else _label(facts.model)),
        "model_version": pool.model_version,
        "prompt_version": pool.prompt_version or _label(stated.prompt_version),
        "data_version": pool.data_version or _label(stated.data_version),
        "system_version": pool.system_version or _label(stated.system_version),
        "request_type": asked.request_type,
        "temperature": _within(asked.temperature, 0, 100),
        "top_p": _within(asked.top_p, 0, 1),
        "seed": _within(asked.seed, -(2**63), 2**63 - 1),
        "max_tokens": _tokens(asked.max_tokens),
        "engine": pool.kind if facts is None else _label(facts.label),
        "hardware": pool.hardware,
        "region": pool.region,
        "tenant": _label(exchange.tenant),
        "cached_tokens": _tokens(captured.cached_tokens),
    }


def _why_not(positions: tuple[Position, ...]) -> NoLogits:
    listed = [token for position in positions for token, _ in position.entries]
    if listed and all(token.id is None and token.raw is None for token in listed):
        return NoLogits.NO_TOKEN_IDENTITY
    return NoLogits.NO_POSITIONS


def _input_tokens(asked: Asked, captured: Captured) -> int:
    """As the engine counted them; else about as many as the prompt's length makes likely."""
    counted = _tokens(captured.input_tokens)
    if counted is not None:
        return counted
    if captured.prompt_token_ids is not None:
        return len(captured.prompt_token_ids)
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in asked.texts) // BYTES_PER_TOKEN


def _between_tokens(captured: Captured) -> int | None:
    """Mean time between tokens; None for less than two."""
    first_us, last_us, tokens = captured.first_token_us, captured.last_token_us, captured.output_tokens
    if first_us is None or last_us is None or tokens < 2:
        return None
    return _duration((last_us - first_us) // (tokens - 1))


def _duration(duration_us: int) -> int:
    return min(max(duration_us, 0), _DAY_US)


def _tokens(count: int | None) -> int | None:
    return _within(count, 0, _MOST_TOKENS)


def _within(value: N | None, least: N, most: N) -> N | None:
    """None for what no event may say: it is not the user's fault, nor the engine's that it was asked."""
    return value if value is not None and least <= value <= most else None


def _label(text: str | None) -> str | None:
    """None for what is no label: empty, too long, not Unicode."""
    if not text or len(text) > _MOST_CHARS or not text.isprintable():
        return None
    return text


def _one_of(known: frozenset[str], said: str | None) -> str | None:
    return None if said is None else said if said in known else OTHER


def _vector(embedding: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if embedding is None or not 0 < len(embedding) <= _MOST_DIMENSIONS:
        return None
    return embedding if all(map(math.isfinite, embedding)) else None
