"""Users of an OpenAI-compatible server, in a process of their own: streaming chats on kept connections.

`python -m tests.bench.users http://127.0.0.1:PORT --requests N --at-once M` prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from itertools import count

import msgspec
from msgspec import Struct

PROMPTS = 200
"""Distinct ones, in turn."""
MAX_TOKENS = 16
"""Unless said otherwise; with `--tokens` answers have exactly so many, as vLLM's `ignore_eos` makes them."""
TIMEOUT_S = 60.0


class Users(Struct, frozen=True):
    """What they saw. Times in ms, one a request that was answered."""

    answered: int
    failed: int
    wall_s: float
    ttft_ms: list[float]
    total_ms: list[float]


def _request(number: int, host: str, tokens: int | None) -> bytes:
    body: dict[str, object] = {
        "model": "fake-1",
        "messages": [{"role": "user", "content": f"Tell me about thing {number % PROMPTS}."}],
        "max_tokens": tokens or MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    if tokens is not None:
        body["ignore_eos"] = True
    told = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer sk-user\r\ncontent-length: {len(told)}\r\n\r\n".encode() + told


async def _answer(reader: asyncio.StreamReader, *, hang_up: bool) -> tuple[bool, float]:
    """Read one answer; whether it was whole and good, and when its first part came."""
    head = await reader.readuntil(b"\r\n\r\n")
    good = head.startswith(b"HTTP/1.1 200")
    first_s, last = 0.0, b""
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        part = await reader.readexactly(size + 2)
        last = part[-32:-2]
        first_s = first_s or time.monotonic()
        if hang_up:
            return False, first_s
    await reader.readuntil(b"\r\n")
    return good and last.endswith(b"data: [DONE]\n\n"), first_s


async def _user(
    address: tuple[str, int],
    numbers: count[int],
    options: argparse.Namespace,
    seen: list[tuple[float, float]],
) -> int:
    """Ask until all is asked; returns how many requests failed."""
    failed, connection = 0, None
    host = f"{address[0]}:{address[1]}"
    while (number := next(numbers)) < options.requests:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if connection is None:
                    connection = await asyncio.open_connection(*address)
                reader, writer = connection
                writer.write(_request(number, host, options.tokens))
                whole, first_s = await _answer(reader, hang_up=options.hang_up)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError):
            whole, first_s = False, 0.0
        if whole:
            seen.append(((first_s - started_s) * 1000, (time.monotonic() - started_s) * 1000))
        else:
            failed += 1
            if connection is not None:
                connection[1].transport.abort()
            connection = None
    if connection is not None:
        connection[1].close()
    return failed


async def _ask(options: argparse.Namespace) -> Users:
    host, _, port = options.url.removeprefix("http://").partition(":")
    numbers, seen = count(), list[tuple[float, float]]()
    started_s = time.monotonic()
    failed = await asyncio.gather(
        *(_user((host, int(port)), numbers, options, seen) for _ in range(options.at_once))
    )
    wall_s = time.monotonic() - started_s
    return Users(len(seen), sum(failed), wall_s, [ttft for ttft, _ in seen], [total for _, total in seen])


def main() -> None:
    """Ask, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hang-up", action="store_true", help="after the first part of each answer")
    told = asyncio.run(_ask(parser.parse_args()))
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")


if __name__ == "__main__":
    main()
