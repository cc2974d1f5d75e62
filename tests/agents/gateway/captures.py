"""Real answers with what was asked and when their bytes came."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from agents.gateway.asking import Added, Asked, EngineKind, read_asked
from agents.gateway.capture import Capture, Captured

KINDS: dict[str, EngineKind] = {
    "llama-cpp-python": "llama-cpp-python",
    "llama-server": "llama.cpp",
    "vllm": "vllm",
}


@dataclass(frozen=True)
class Recorded:
    """One answer. `reads`: microseconds since the request and offset in the body, as read from the socket."""

    name: str
    kind: EngineKind
    asked: Asked
    body: bytes
    reads: tuple[tuple[int, int], ...]

    def pieces(self, *cuts: int) -> list[tuple[int, bytes]]:
        """The body as it was read, cut further at these offsets."""
        times = {offset: at_us for at_us, offset in self.reads}
        edges = sorted({offset for _, offset in self.reads} | {c for c in cuts if 0 < c < len(self.body)})
        out, at_us = [], 0
        for start, end in zip(edges, [*edges[1:], len(self.body)], strict=True):
            at_us = times.get(start, at_us)
            out.append((at_us, self.body[start:end]))
        return out


def recorded(shared_dir: Path) -> list[Recorded]:
    """All of them."""
    folder = shared_dir / "data" / "sse"
    bodies = [*folder.glob("*/*.sse"), *folder.glob("*/*.json")]
    return [
        load(folder, f"{file.parent.name}/{file.name}")
        for file in sorted(bodies)
        if not file.name.endswith((".meta.json", ".request.json"))
    ]


def load(folder: Path, name: str) -> Recorded:
    file = folder / name
    stem = file.name.rsplit(".", 1)[0]
    meta = file.with_name(stem + ".meta.json")
    if meta.exists():
        told = json.loads(meta.read_bytes())
        request, reads = told["request"], [(round(ms * 1000), offset) for ms, offset in told["reads"]]
    else:
        request = json.loads(file.with_name(stem + ".request.json").read_bytes())
        if "messages_of_prompt" in request:
            request["body"]["messages"] = [{"role": "user", "content": request["messages_of_prompt"]}]
        with file.with_name(stem + ".timing.csv").open() as rows:
            reads = [
                (round(float(row[0]) * 1000), int(row[1])) for row in csv.reader(rows) if row[0][0].isdigit()
            ]
    asked = read_asked(request["path"], json.dumps(request["body"]).encode())
    assert asked is not None, name
    kind = KINDS[file.parent.name.split("_")[0]]
    return Recorded(name, kind, asked, file.read_bytes(), tuple(reads))


def capture(
    kind: EngineKind, asked: Asked, added: Added, pieces: list[tuple[int, bytes]], **more: int
) -> tuple[bytes, Captured]:
    """What the user got, and what was learnt."""
    reading = Capture(kind, asked, added, **more)
    got = b"".join([reading.feed(data, at_us) for at_us, data in pieces])
    got += reading.end(pieces[-1][0] if pieces else 0)
    return got, reading.captured()
