"""What a recording holds, measured: `python -m pipeline.cli.demo.measure_recording [FILE]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pipeline.cli.demo.recording import (
    SHIPPED,
    SIDES,
    About,
    Answer,
    Prompt,
    Recording,
    Side,
    VariantName,
    read_recording,
)
from pipeline.core.divergence import Half, PairScores, score_pairs
from schemas.events import LogitEvent
from schemas.tabulate import logit_columns


@dataclass(frozen=True, slots=True)
class Measured:
    """Baseline against one variant on one side; scores are means over pairs, in nats."""

    side: Side
    variant: VariantName
    pairs: int
    positions: int
    kl_lower: float
    kl_floor: float
    median_ttft_us: int
    longest_us: int


def logit_event(answer: Answer, about: About) -> LogitEvent:
    """A recorded answer with the least labels that make it an event."""
    return LogitEvent(
        v=1,
        rollout="recording",
        arm="baseline",
        signature="0" * 32,
        ts_us=0,
        duration_us=answer.duration_us,
        node="engine",
        input_tokens=answer.input_tokens,
        model_version=answer.variant,
        expected_arms=("baseline",),
        definition=about.definition,
        source="generated",
        precision=about.precision,
        tokens=answer.tokens,
        top_ids=answer.top_ids,
        top_logprobs=answer.top_logprobs,
        ended=answer.ended,
    )


def scores(prompts: Sequence[Prompt], variant: VariantName, about: About) -> PairScores:
    """Every prompt's baseline answer against its answer by `variant`, in the order of the prompts."""
    halves = [
        [Half(logit_columns([logit_event(prompt.answers[name], about)]), 0) for name in ("baseline", variant)]
        for prompt in prompts
    ]
    return score_pairs([(baseline, other) for baseline, other in halves])


def measure(recording: Recording) -> list[Measured]:
    """One row per side and variant that every prompt of the side has."""
    rows = []
    for side in SIDES:
        prompts = recording.prompts[side]
        names: tuple[VariantName, ...] = ("healthy", "control", "fault")
        for variant in names:
            if not all(variant in prompt.answers for prompt in prompts):
                continue
            scored = scores(prompts, variant, recording.about)
            answers = [prompt.answers[variant] for prompt in prompts]
            rows.append(
                Measured(
                    side,
                    variant,
                    scored.n,
                    int(scored.positions.sum()),
                    float(scored.kl_lower.mean()),
                    float(scored.kl_floor.mean()),
                    round(median(answer.ttft_us for answer in answers)),
                    max(answer.duration_us for answer in answers),
                )
            )
    return rows


def table(rows: Sequence[Measured]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| side | variant | pairs | positions | mean kl_lower | mean kl_floor | median TTFT ms | max ms |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.side} | {row.variant} | {row.pairs} | {row.positions} | {row.kl_lower:.4f} | "
            f"{row.kl_floor:.4f} | {row.median_ttft_us / 1000:.0f} | {row.longest_us / 1000:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    print(table(measure(read_recording(chosen))))  # noqa: T201
