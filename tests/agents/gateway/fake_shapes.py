"""Answers in the shapes of vLLM, llama.cpp, llama-cpp-python, SGLang and TGI, after captures of real ones.

Fields are there, in that order and with those separators, exactly when the engine would send them: with and
without log-probabilities, usage and token ids. Times that an engine would tell are constants.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.agents.gateway.fake_asked import Wanted
from tests.agents.gateway.fake_model import Step, scored, text_of

CREATED = 1_790_000_000
DONE = b"data: [DONE]\n\n"
TOOL_ARGUMENTS = ('{"city"', ': "Paris"', "}")
TIMINGS = {"cache_n": 0, "prompt_n": 7, "prompt_ms": 3.5, "predicted_n": 5, "predicted_ms": 62.25}


@dataclass(frozen=True, slots=True)
class Said:
    """One choice: its tokens, what each adds to the text, and why it ended."""

    index: int
    steps: Sequence[Step]
    texts: Sequence[str]
    finish: str
    stop_reason: str | None


def dumps(kind: str, value: object) -> bytes:
    """JSON as the engine prints it."""
    compact = kind != "llama-cpp-python"
    separators = (",", ":") if compact else (", ", ": ")
    return json.dumps(value, separators=separators, ensure_ascii=not compact).encode()


def event(kind: str, value: object) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % dumps(kind, value)


def entry(kind: str, wanted: Wanted, step: Step) -> dict[str, Any]:
    """A token's log-probabilities in the chat shape."""
    best = list(step.top)
    if kind == "vllm":
        best = [(step.id, step.logprob), *(pair for pair in best if pair[0] != step.id)]
    elif kind == "llama-cpp-python" and step.id not in dict(best[: wanted.top]):
        best = [*best[: wanted.top], (step.id, step.logprob)]
        return _candidate(kind, wanted, step.id, step.logprob) | {
            "top_logprobs": [_candidate(kind, wanted, token, value) for token, value in best]
        }
    tops = [_candidate(kind, wanted, token, value) for token, value in best[: wanted.top]]
    return _candidate(kind, wanted, step.id, step.logprob) | {"top_logprobs": tops}


def _candidate(kind: str, wanted: Wanted, token: int, logprob: float) -> dict[str, Any]:
    text = f"token_id:{token}" if wanted.ids_as_strings else text_of(token)
    raw = list(text.encode())
    if kind == "llama.cpp":
        return {"id": token, "token": text, "bytes": raw, "logprob": logprob}
    if kind == "vllm":
        return {"token": text, "logprob": logprob, "bytes": raw}
    if kind == "sglang":
        return {"token": text, "bytes": raw, "logprob": logprob}
    if kind == "tgi":
        return {"token": text, "logprob": logprob}
    return {"token": text, "bytes": None, "logprob": logprob}


def content(kind: str, wanted: Wanted, steps: Sequence[Step]) -> dict[str, Any] | None:
    """`logprobs` of a chat choice."""
    if wanted.top is None:
        return None
    found: dict[str, Any] = {"content": [entry(kind, wanted, step) for step in steps]}
    return found | {"refusal": None} if kind == "llama-cpp-python" else found


def legacy(kind: str, wanted: Wanted, steps: Sequence[Step], offset: int) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice."""
    if wanted.top is None or kind == "tgi":
        return None
    if kind == "llama.cpp":
        return content(kind, wanted, steps)
    names = [f"token_id:{step.id}" if wanted.ids_as_strings else text_of(step.id) for step in steps]
    tops, offsets = [], []
    for step, name in zip(steps, names, strict=True):
        pairs = [(step.id, step.logprob)] if kind == "vllm" else []
        pairs += [pair for pair in step.top[: wanted.top] if pair[0] != step.id or kind != "vllm"]
        tops.append({(f"token_id:{t}" if wanted.ids_as_strings else text_of(t)): v for t, v in pairs})
        offsets.append(-1 if kind == "sglang" else offset)
        offset += len(name)
    values = [step.logprob for step in steps]
    if kind == "vllm":
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}
    return {"tokens": names, "text_offset": offsets, "token_logprobs": values, "top_logprobs": tops}


def usage(kind: str, wanted: Wanted, said: Sequence[Said]) -> dict[str, Any]:
    """As the engine counts; what is told of cached tokens is 0."""
    emitted = sum(len(one.steps) for one in said)
    if kind == "llama.cpp":
        return {
            "completion_tokens": emitted,
            "prompt_tokens": len(wanted.prompt),
            "total_tokens": emitted + len(wanted.prompt),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    return {
        "prompt_tokens": len(wanted.prompt),
        "total_tokens": emitted + len(wanted.prompt),
        "completion_tokens": emitted,
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """One engine's chunks."""

    kind: str
    wanted: Wanted
    id: str
    model: str
    damage: float = 0.0

    def head(self, whole: bool = False) -> dict[str, Any]:
        """What every chunk begins with (llama.cpp: ends with, see `_chunk`)."""
        wanted = self.wanted
        object_ = "text_completion"
        if wanted.chat:
            object_ = "chat.completion" if whole else "chat.completion.chunk"
        if self.kind == "llama.cpp":
            return {
                "created": CREATED,
                "id": self.id,
                "model": self.model,
                "system_fingerprint": "b0-unknown",
                "object": object_,
            }
        if self.kind == "llama-cpp-python" and wanted.chat:
            return {"id": self.id, "model": self.model, "created": CREATED, "object": object_}
        if self.kind == "tgi":
            return {
                "object": object_,
                "id": "",
                "created": CREATED,
                "model": self.model,
                "system_fingerprint": "3.3.6-native",
            }
        return {"id": self.id, "object": object_, "created": CREATED, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        if self.kind == "llama.cpp":
            return event(self.kind, {"choices": choices, **self.head(), **more})
        if self.kind in ("sglang", "tgi"):
            more.setdefault("usage", None)
        return event(self.kind, {**self.head(), "choices": choices, **more})

    def opening(self, index: int) -> list[bytes]:
        """The role chunk, where the engine has one."""
        if not self.wanted.chat:
            return []
        ids = list(self.wanted.prompt) if self.wanted.token_ids else None
        if self.kind == "vllm":
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
            choice |= {"logprobs": None, "finish_reason": None}
            return [self._chunk([choice], prompt_token_ids=ids, prompt_text=None)]
        if self.kind == "llama.cpp":
            delta = {"role": "assistant", "content": None}
            return [self._chunk([{"finish_reason": None, "index": index, "delta": delta}])]
        if self.kind == "sglang":
            delta = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}
            return [self._chunk([self._sglang(index, delta, None, None, None)])]
        if self.kind == "llama-cpp-python":
            choice = {"index": index, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}
            return [self._chunk([choice])]
        return []

    @staticmethod
    def _sglang(
        index: int, delta: object, logprobs: object, finish: str | None, matched: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            "matched_stop": matched,
        }

    def token(self, said: Said, place: int, offset: int) -> list[bytes]:
        """The chunk of one emitted token; vLLM's and TGI's last one carries the finish reason."""
        step, text = said.steps[place], said.texts[place]
        last = place == len(said.steps) - 1
        finish = said.finish if last and self.kind in ("vllm", "tgi") else None
        if not self.wanted.chat:
            return [self._chunk([self._completion(said, [step], text, finish, offset)])]
        logprobs = content(self.kind, self.wanted, [step])
        if self.kind == "vllm":
            choice: dict[str, Any] = {"index": said.index, "delta": {"content": text}, "logprobs": logprobs}
            choice["finish_reason"] = finish
            if finish:
                choice["stop_reason"] = said.stop_reason
            choice["token_ids"] = [step.id] if self.wanted.token_ids else None
            return [self._chunk([choice])]
        if self.kind == "llama.cpp":
            choice = {"finish_reason": None, "index": said.index, "delta": {"content": text}}
            return [self._chunk([choice | ({} if logprobs is None else {"logprobs": logprobs})])]
        if self.kind == "sglang":
            if not text:
                return []  # a step without text loses its log-probabilities
            delta = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
            return [self._chunk([self._sglang(said.index, delta, logprobs, None, None)])]
        if self.kind == "tgi":
            delta = {"role": "assistant", "content": text}
            choice = {"index": said.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return [self._chunk([choice])]
        choice = {"index": said.index, "delta": {"content": text}, "logprobs": logprobs}
        return [self._chunk([choice | {"finish_reason": None}])]

    def _completion(
        self, said: Said, steps: Sequence[Step], text: str, finish: str | None, offset: int
    ) -> dict[str, Any]:
        logprobs = legacy(self.kind, self.wanted, steps, offset) if steps else None
        if self.kind == "llama.cpp":
            return {"text": text, "index": said.index, "logprobs": logprobs, "finish_reason": finish}
        if self.kind == "tgi":
            return {"index": said.index, "text": text, "logprobs": None, "finish_reason": finish or ""}
        choice = {"index": said.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self.kind == "vllm":
            ids = [step.id for step in steps] if self.wanted.token_ids else None
            prompt = list(self.wanted.prompt) if self.wanted.token_ids and offset == 0 else None
            reason = said.stop_reason if finish else None
            choice |= {"stop_reason": reason, "prompt_token_ids": prompt, "token_ids": ids}
        if self.kind == "sglang":
            choice["matched_stop"] = None
        return choice

    def closing(self, said: Said) -> list[bytes]:
        """The finish chunk of a choice, where it is one of its own."""
        more: dict[str, Any] = {}
        if self.kind == "llama.cpp":
            if not self.wanted.chat:
                more = {"usage": usage(self.kind, self.wanted, [said]), "timings": TIMINGS}
            elif not self.wanted.usage:
                more = {"timings": TIMINGS}
        elif self.kind not in ("sglang", "llama-cpp-python"):
            return []
        if not self.wanted.chat:
            return [self._chunk([self._completion(said, [], "", said.finish, 0)], **more)]
        if self.kind == "llama.cpp":
            return [self._chunk([{"finish_reason": said.finish, "index": said.index, "delta": {}}], **more)]
        if self.kind == "sglang":
            delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
            return [self._chunk([self._sglang(said.index, delta, None, said.finish, said.stop_reason)])]
        choice = {"index": said.index, "delta": {}, "logprobs": None, "finish_reason": said.finish}
        return [self._chunk([choice])]

    def ending(self, said: Sequence[Said]) -> list[bytes]:
        """The usage chunk, if it was asked for and the engine sends one."""
        if not self.wanted.usage or self.kind == "llama-cpp-python":
            return []
        counted = usage(self.kind, self.wanted, said)
        if self.kind == "llama.cpp":
            return [self._chunk([], usage=counted, timings=TIMINGS)] if self.wanted.chat else []
        if self.kind == "vllm":
            return [self._chunk([], usage=counted, system_fingerprint="vllm-0.32.0-fake")]
        return [self._chunk([], usage=counted)]

    def tool_chunks(self, name: str) -> Iterator[bytes]:
        """A streamed tool call."""
        call: dict[str, Any] = {"id": "call-1", "type": "function", "index": 0}
        deltas: list[Mapping[str, Any]] = [call | {"function": {"name": name, "arguments": ""}}]
        deltas += [{"index": 0, "function": {"arguments": part}} for part in TOOL_ARGUMENTS]
        for delta in deltas:
            choice = {"index": 0, "delta": {"tool_calls": [delta]}, "logprobs": None, "finish_reason": None}
            if self.kind == "llama.cpp":
                choice = {"finish_reason": None, "index": 0, "delta": {"tool_calls": [delta]}}
            yield self._chunk([choice])
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "tool_calls"}
        if self.kind == "llama.cpp":
            choice = {"finish_reason": "tool_calls", "index": 0, "delta": {}}
        yield self._chunk([choice])

    def whole(self, said: Sequence[Said], tool: str | None) -> bytes:
        """The answer that is not streamed."""
        wanted, kind = self.wanted, self.kind
        choices = [self._whole_choice(one, tool) for one in said]
        counted = usage(kind, wanted, said)
        if kind == "llama.cpp":
            body = {"choices": choices, **self.head(True), "usage": counted, "timings": TIMINGS}
            return dumps(kind, body)
        more: dict[str, Any] = {}
        if kind == "vllm":
            more = {"service_tier": None, "system_fingerprint": "vllm-0.32.0-fake"}
        after: dict[str, Any] = {}
        if kind == "vllm" and wanted.chat:
            ids = list(wanted.prompt) if wanted.token_ids else None
            after = {"prompt_logprobs": self._prompt_logprobs(), "prompt_token_ids": ids}
            after |= {"prompt_text": None, "kv_transfer_params": None, "metrics": None}
        # As captured: llama-cpp-python puts spaces into streams alone.
        return dumps("vllm", {**self.head(True), "choices": choices, **more, "usage": counted, **after})

    def _whole_choice(self, said: Said, tool: str | None) -> dict[str, Any]:
        wanted, kind = self.wanted, self.kind
        text = "".join(said.texts)
        if not wanted.chat:
            choice = self._completion(said, said.steps, text, said.finish, 0)
            if kind == "vllm":
                choice["prompt_logprobs"] = self._prompt_logprobs()
            return choice
        message: dict[str, Any] = {"role": "assistant", "content": None if tool else text}
        if tool:
            called = {"name": tool, "arguments": "".join(TOOL_ARGUMENTS)}
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": called}]
        logprobs = None if tool and kind == "llama.cpp" else content(kind, wanted, said.steps)
        if kind == "llama.cpp":
            choice = {"finish_reason": said.finish, "index": said.index, "message": message}
            return choice | ({} if logprobs is None else {"logprobs": logprobs})
        choice = {"index": said.index, "message": message, "logprobs": logprobs}
        choice["finish_reason"] = said.finish
        if kind == "vllm":
            ids = [step.id for step in said.steps] if wanted.token_ids else None
            choice |= {"stop_reason": said.stop_reason, "token_ids": ids}
        return choice

    def _prompt_logprobs(self) -> list[Any] | None:
        k = self.wanted.prompt_logprobs
        if k is None:
            return None
        places: list[Any] = [None]
        for step in scored(self.wanted.prompt, self.damage):
            best = step.top[:k]
            ranks = {token: number for number, (token, _) in enumerate(step.top, start=1)}
            pairs = [(step.id, step.logprob), *(pair for pair in best if pair[0] != step.id)]
            places.append(
                {
                    str(t): {"logprob": v, "rank": ranks.get(t, 99), "decoded_token": text_of(t)}
                    for t, v in pairs
                }
            )
        return places
