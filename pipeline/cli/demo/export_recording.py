"""A recording as captures for `klaxon compare`.

`python -m pipeline.cli.demo.export_recording VARIANT SIDE N` prints one OpenAI-style response a line, as
llama-server shapes them: token ids, log-probabilities, top lists. The recording keeps no text, so `token` is
empty; answers are told apart by ids. Made the files in docs/examples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import orjson

from pipeline.cli.demo.recording import SHIPPED, Answer, Recording, Side, VariantName, read_recording


def entries(answer: Answer) -> Iterator[dict[str, object]]:
    """One entry of `logprobs.content` per emitted token."""
    for token, ids, logprobs in zip(answer.tokens, answer.top_ids, answer.top_logprobs, strict=True):
        listed = dict(zip(ids, logprobs, strict=True))
        top = [{"id": one, "token": "", "logprob": logprob} for one, logprob in listed.items()]
        yield {"id": token, "token": "", "logprob": listed.get(token), "top_logprobs": top}


def responses(
    recording: Recording, variant: VariantName, side: Side, count: int
) -> Iterator[dict[str, object]]:
    """The first `count` prompts of a side as responses of this variant."""
    for prompt in recording.prompts[side][:count]:
        answer = prompt.answers[variant]
        choice = {
            "index": 0,
            "finish_reason": "stop" if answer.ended else "length",
            "logprobs": {"content": list(entries(answer))},
        }
        yield {"prompt_id": prompt.prompt_id, "object": "chat.completion", "choices": [choice]}


def main(arguments: list[str]) -> int:
    """Print the responses asked for; 2 on wrong usage."""
    match arguments:
        case [("baseline" | "healthy" | "control" | "fault") as variant, ("short" | "long") as side, count]:
            for response in responses(read_recording(SHIPPED), variant, side, int(count)):
                sys.stdout.buffer.write(orjson.dumps(response) + b"\n")
            return 0
        case _:
            sys.stderr.write("usage: export_recording baseline|healthy|control|fault short|long N\n")
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
