"""What a copy's answer lacks to be compared, of an engine that was asked for one token. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from agents.engines.logprobs import UNMEASURED
from agents.gateway.capture import Captured
from agents.gateway.settings import CHAT
from schemas.answers.positions import Position, has_ids

Code = Literal["away", "credential", "model", "refused", "logprobs", "stream", "forced", "definition", "path"]
Identity = Literal["ids", "bytes", "none"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one engine, or one path of it. `fatal`: nothing of it can be compared."""

    code: Code
    fatal: bool
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PathChecked:
    """What one path answered. Absent numbers: it answered nothing that says them."""

    path: str
    candidates: int = 0
    identity: Identity = "none"
    ttft_us: int | None = None
    problems: tuple[Problem, ...] = ()


_UNNAMED: Final = Problem(
    "logprobs",
    fatal=True,
    what="tokens come with neither ids nor bytes: candidates of two engines cannot be matched",
    remedy="use another engine or endpoint: TGI, llama-cpp-python and SGLang's /v1/completions have neither",
)


def first_position(captured: Captured) -> Position | None:
    generated = () if captured.answer is None else captured.answer.generated
    return generated[0] if generated and generated[0].entries else None


def identity_of(position: Position | None) -> Identity:
    if position is None:
        return "none"
    if has_ids([position]):
        return "ids"
    return "bytes" if all(token.raw is not None for token, _ in position.entries) else "none"


def lacks_of(captured: Captured, top: int, streamed: bool) -> list[Problem]:
    """What a copy's answer lacks."""
    position = first_position(captured)
    if captured.skipped == "no_token_identity":
        return [_UNNAMED]
    if position is None:
        said = f" ({captured.error})" if captured.error is not None else ""
        return [
            Problem(
                "logprobs",
                fatal=True,
                what=f"its answer holds no log-probabilities{said}",
                remedy="turn them on (vLLM: --max-logprobs; SGLang and llama.cpp answer them when asked)",
            )
        ]
    found = []
    values = [value for _, value in position.entries]
    if not all(math.isfinite(one) and one <= 0 for one in values) or all(one <= UNMEASURED for one in values):
        found.append(
            Problem(
                "logprobs",
                fatal=True,
                what="its log-probabilities are none: not finite, above 0, or -9999",
                remedy="look at the engine's log: a model that computes NaN answers so",
            )
        )
    if identity_of(position) == "none":
        found.append(_UNNAMED)
    if len(values) < top:
        found.append(
            Problem(
                "logprobs",
                fatal=False,
                what=f"{len(values)} of {top} candidates a position: divergence is bounded less closely",
                remedy=f"allow {top + 1} (vLLM: --max-logprobs, TGI: --max-top-n-tokens)",
            )
        )
    if streamed and captured.first_token_us is None:
        found.append(
            Problem(
                "stream",
                fatal=False,
                what="its answer is not streamed: the time to its first token is not known",
                remedy="look at what stands between: a proxy that gathers answers hides when they began",
            )
        )
    return found


def weighed(paths: Sequence[PathChecked]) -> list[Problem]:
    """Problems of paths. With one path that works, another that does not is no reason to compare nothing."""
    works = any(not any(one.fatal for one in path.problems) for path in paths)
    found: list[Problem] = []
    for path in paths:
        for one in path.problems:
            if works and one.fatal:
                key = "chat" if path.path == CHAT else "completions"
                what = one.what if one.what.startswith(path.path) else f"{path.path}: {one.what}"
                remedy = f"{one.remedy}; or mirror nothing of this path: mirror.paths.{key}: false"
                found.append(Problem("path", fatal=False, what=what, remedy=remedy))
            else:
                found.append(one)
    return found
