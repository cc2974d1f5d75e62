"""A recording: answers of real engines with their top-k lists and times, replayed unchanged by the demo.

File: JSON lines, gzipped when the name ends in `.gz`. Each line one answer:
`{"prompt_id", "side": "short|long", "variant": "baseline|healthy|control|fault", "input_tokens",
"cached_tokens", "ttft_us", "duration_us", "ended", "tokens": [T ids], "top_ids": [T lists],
"top_logprobs": [T lists]}`; short = at most 2,048 prompt tokens. A line with the key `recording` describes
the file (`model`, `engine`, `definition`, `precision`, `boundary_tokens`) and comes first.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from pipeline.cli.demo.errors import DemoError
from schemas.events import DurationUs, Name, TokenId, Tokens

SHIPPED: Final = Path(__file__).parent / "recording" / "answers.jsonl.gz"

Side = Literal["short", "long"]
VariantName = Literal["baseline", "healthy", "control", "fault"]
SIDES: Final[tuple[Side, ...]] = ("short", "long")
NEEDED: Final[tuple[VariantName, ...]] = ("baseline", "healthy", "control")
MAX_LINE_BYTES: Final = 8 << 20


class RecordingError(DemoError):
    """A recording cannot be used; the message names file, line and remedy."""


class About(Struct, frozen=True, kw_only=True):
    """First line of a recording."""

    recording: Literal[1]
    model: Name
    engine: Name
    definition: Literal["raw", "temperature", "processed"]
    precision: Annotated[int, Meta(ge=1, le=17)] | Literal["f16", "f32", "f64"]
    boundary_tokens: Tokens


class Answer(Struct, frozen=True, kw_only=True):
    """One recorded answer of one variant of the engine."""

    prompt_id: Name
    side: Side
    variant: VariantName
    input_tokens: Tokens
    cached_tokens: Tokens = 0
    ttft_us: DurationUs
    duration_us: DurationUs
    ended: bool
    tokens: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=4096)]
    top_ids: tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=20)], ...]
    top_logprobs: tuple[Annotated[tuple[float, ...], Meta(min_length=1, max_length=20)], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with the answer of every variant."""

    prompt_id: str
    side: Side
    answers: Mapping[VariantName, Answer]


@dataclass(frozen=True, slots=True)
class Recording:
    """All prompts, by side. Each has answers of baseline, healthy and control; long ones of fault too."""

    about: About
    prompts: Mapping[Side, tuple[Prompt, ...]]


def read_recording(path: Path, *, fault: bool = True) -> Recording:
    """Read and check a recording. Blocks. `fault`: whether long prompts need a faulty answer.

    Raises RecordingError."""
    about: About | None = None
    answers: dict[tuple[Side, str], dict[VariantName, Answer]] = {}
    for number, line in _lines(path):
        try:
            if about is None:
                about = msgspec.json.decode(line, type=About)
                continue
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError as error:
            raise RecordingError(f"{path}:{number}: {error}; record it anew or mend the line") from None
        _check(answer, about, path, number)
        of_prompt = answers.setdefault((answer.side, answer.prompt_id), {})
        if answer.variant in of_prompt:
            raise RecordingError(
                f"{path}:{number}: {answer.prompt_id} has two answers of variant {answer.variant}; keep one"
            )
        of_prompt[answer.variant] = answer
    if about is None:
        raise RecordingError(f"{path}: empty; the first line describes the recording")
    return Recording(about, _prompts(answers, path, fault=fault))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecordingError(f"{path}: cannot be read: {reason}; name another with --recording") from None


def _check(answer: Answer, about: About, path: Path, number: int) -> None:
    if not len(answer.tokens) == len(answer.top_ids) == len(answer.top_logprobs):
        raise RecordingError(f"{path}:{number}: tokens, top_ids and top_logprobs differ in length")
    for ids, logprobs in zip(answer.top_ids, answer.top_logprobs, strict=True):
        if len(ids) != len(logprobs):
            raise RecordingError(f"{path}:{number}: a position's ids and log-probabilities differ in length")
    if (answer.input_tokens > about.boundary_tokens) != (answer.side == "long"):
        raise RecordingError(
            f"{path}:{number}: side {answer.side!r} with {answer.input_tokens} prompt tokens; "
            f"long is more than {about.boundary_tokens}"
        )
    if answer.ttft_us > answer.duration_us:
        raise RecordingError(f"{path}:{number}: ttft_us is greater than duration_us")


def _prompts(
    answers: Mapping[tuple[Side, str], dict[VariantName, Answer]], path: Path, *, fault: bool
) -> dict[Side, tuple[Prompt, ...]]:
    prompts: dict[Side, list[Prompt]] = {side: [] for side in SIDES}
    for (side, prompt_id), of_prompt in answers.items():
        needed = (*NEEDED, "fault") if fault and side == "long" else NEEDED
        missing = [name for name in needed if name not in of_prompt]
        if missing:
            raise RecordingError(f"{path}: prompt {prompt_id!r} has no answer of {', '.join(missing)}")
        prompts[side].append(Prompt(prompt_id, side, of_prompt))
    for side in SIDES:
        if not prompts[side]:
            raise RecordingError(f"{path}: no {side} prompts; a recording holds both sides")
    return {side: tuple(found) for side, found in prompts.items()}
