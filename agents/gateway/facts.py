"""What an engine says of itself: log-probability mode, determinism, KV type, version.

`facts_of` is pure: answers by path to facts. `read_facts` asks for them. What each engine says where:

| kind | asked | says |
|---|---|---|
| vllm | /version, /v1/models, /server_info?config_format=json (only with VLLM_SERVER_DEV_MODE=1) | all |
| sglang | /server_info (before: /get_server_info), /v1/models | all but the definition |
| llama.cpp | /props, /v1/models | build and context; not the KV type |
| llama-cpp-python | /v1/models | the model |
| tgi | /info, /v1/models | version, context |

No engine is believed: texts are cut and of printable ASCII, numbers in range, everything else is unsaid.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp

from schemas.events import Definition

MOST_BYTES: Final = 4 << 20
"""Of one answer. vLLM's server_info lists the packages of its environment: some hundred kilobytes."""
TIMEOUT_S: Final = 5.0
"""For all questions to one engine together."""
_MOST_CHARS: Final = 64
_MOST_TOKENS: Final = 2**31 - 1
_WORD: Final = re.compile(r"[\x21-\x7e]+")

ASKED: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("/version", "/v1/models", "/server_info?config_format=json"),
    "sglang": ("/server_info", "/get_server_info", "/v1/models"),
    "llama.cpp": ("/props", "/v1/models"),
    "llama-cpp-python": ("/v1/models",),
    "tgi": ("/info", "/v1/models"),
}
"""Paths by kind of engine; none of them changes anything there."""

_VLLM_MODES: Final[Mapping[str, tuple[Definition, bool]]] = {
    "raw_logprobs": ("raw", False),
    "processed_logprobs": ("processed", False),
    "raw_logits": ("raw", True),
    "processed_logits": ("processed", True),
}
DEFINITIONS: Final[Mapping[str, Definition]] = {
    "vllm": "raw",
    "sglang": "temperature",
    "llama.cpp": "raw",
    "llama-cpp-python": "raw",
    "tgi": "processed",
}
"""What each kind answers unless it was started otherwise."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine said of itself; None: it did not say, and then the configuration's value holds."""

    kind: str
    version: str | None = None
    model: str | None = None
    """The first model that it serves."""
    definition: Definition | None = None
    logits: bool = False
    """It answers logits in place of log-probabilities (vLLM's raw_logits and processed_logits)."""
    deterministic: bool | None = None
    """Equal answers whatever else is in the batch."""
    kv_type: str | None = None
    max_logprobs: int | None = None
    """Most candidates a position that it answers; None: no limit that it tells."""
    context_tokens: int | None = None
    weights: str | None = None
    """The version of weights that were loaded last (SGLang, which exchanges them while it serves)."""
    complete: bool = False
    """It could be asked; False: away, or it answered nothing of this kind."""

    @property
    def label(self) -> str:
        """The events' `engine`: kind, version, then mode, KV type, determinism and most candidates if known.

        `vllm 0.32.1 mode=raw kv=fp8 deterministic=no top=20`; at most 256 characters.
        """
        told = [self.kind if self.version is None else f"{self.kind} {self.version}"]
        if self.definition is not None:
            told.append(f"mode={self.definition}{'_logits' if self.logits else ''}")
        if self.kv_type is not None:
            told.append(f"kv={self.kv_type}")
        if self.deterministic is not None:
            told.append(f"deterministic={'yes' if self.deterministic else 'no'}")
        if self.max_logprobs is not None:
            told.append(f"top={self.max_logprobs}")
        return " ".join(told)[:256]


def facts_of(kind: str, answers: Mapping[str, object]) -> EngineFacts:
    """From what was answered to `ASKED[kind]`: path to parsed JSON; a path without an answer is absent."""
    first = next(iter(_listed(answers.get("/v1/models"), "data")), {})
    facts = EngineFacts(kind=kind, model=_text(first, "id", chars=256), complete=bool(answers))
    if kind == "vllm":
        return _of_vllm(facts, first, answers)
    if kind == "sglang":
        return _of_sglang(
            facts, _object(answers.get("/server_info")) or _object(answers.get("/get_server_info"))
        )
    if kind == "llama.cpp":
        return _of_llama_cpp(facts, _object(answers.get("/props")))
    if kind == "tgi":
        return _of_tgi(facts, _object(answers.get("/info")))
    return facts


def _of_vllm(facts: EngineFacts, model: Mapping[str, Any], answers: Mapping[str, object]) -> EngineFacts:
    info = _object(answers.get("/server_info?config_format=json"))
    config, environment = _object(info.get("vllm_config")), _object(info.get("vllm_env"))
    models = _object(config.get("model_config"))
    mode = _VLLM_MODES.get(_text(models, "logprobs_mode") or "")
    return replace(
        facts,
        version=_text(_object(answers.get("/version")), "version"),
        definition=None if mode is None else mode[0],
        logits=mode is not None and mode[1],
        deterministic=_flag(environment, "VLLM_BATCH_INVARIANT"),
        kv_type=_text(_object(config.get("cache_config")), "cache_dtype"),
        max_logprobs=_number(models, "max_logprobs"),
        context_tokens=_number(model, "max_model_len"),
    )


def _of_sglang(facts: EngineFacts, info: Mapping[str, Any]) -> EngineFacts:
    return replace(
        facts,
        version=_text(info, "version"),
        deterministic=_flag(info, "enable_deterministic_inference"),
        kv_type=_text(info, "kv_cache_dtype"),
        context_tokens=_number(info, "context_length"),
        weights=_text(info, "weight_version"),
    )


def _of_llama_cpp(facts: EngineFacts, props: Mapping[str, Any]) -> EngineFacts:
    settings = _object(props.get("default_generation_settings"))
    post = _flag(_object(settings.get("params")), "post_sampling_probs")
    return replace(
        facts,
        version=_text(props, "build_info"),
        definition=None if post is None else "processed" if post else "raw",
        kv_type=_text(props, "cache_type_k"),
        context_tokens=_number(settings, "n_ctx"),
    )


def _of_tgi(facts: EngineFacts, info: Mapping[str, Any]) -> EngineFacts:
    return replace(
        facts,
        version=_text(info, "version"),
        max_logprobs=_number(info, "max_top_n_tokens"),
        context_tokens=_number(info, "max_total_tokens"),
    )


async def read_facts(
    session: aiohttp.ClientSession,
    kind: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> EngineFacts:
    """Ask one engine, for at most `timeout_s` in all. Never raises: what is not answered is not said.

    `headers`: its own credential, where it wants one. `url`: as in EngineSettings, perhaps with a prefix.
    """
    answers: dict[str, object] = {}
    try:
        async with asyncio.timeout(timeout_s):
            for path in ASKED[kind]:
                answer = await _answer(session, url.rstrip("/").removesuffix("/v1") + path, headers or {})
                if answer is not None:
                    answers[path] = answer
    except TimeoutError:
        pass
    return facts_of(kind, answers)


async def _answer(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> object:
    """The JSON that one path answers; None: none, or none to be had."""
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                return None
            data = await _bounded(response.content)
    except (aiohttp.ClientError, OSError, ValueError):
        return None
    if data is None:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


async def _bounded(content: aiohttp.StreamReader) -> bytes | None:
    """All of it, or None where it is more than MOST_BYTES."""
    data = bytearray()
    async for part in content.iter_any():
        data += part
        if len(data) > MOST_BYTES:
            return None
    return bytes(data)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _listed(value: object, name: str) -> list[Mapping[str, Any]]:
    listed = _object(value).get(name)
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _text(of: Mapping[str, Any], name: str, *, chars: int = _MOST_CHARS) -> str | None:
    """Printable ASCII without spaces, cut: it becomes a label."""
    value = of.get(name)
    if not isinstance(value, str):
        return None
    return "".join(_WORD.findall(value[: 4 * chars]))[:chars] or None


def _number(of: Mapping[str, Any], name: str) -> int | None:
    """Above 0; vLLM's −1, no limit, is none that it tells."""
    value = of.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= _MOST_TOKENS else None


def _flag(of: Mapping[str, Any], name: str) -> bool | None:
    value = of.get(name)
    if isinstance(value, bool):
        return value
    return bool(value) if value in (0, 1) else None
