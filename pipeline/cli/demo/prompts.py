"""The prompts of the recording: questions about documents made of Python's own docstrings (PSF licence).

Texts depend on the Python version; the recording keeps the SHA-256 of every prompt's token ids.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

BOUNDARY_TOKENS: Final = 2048
"""The two sides of the recording: prompts of at most this many tokens, and longer ones."""

QUESTIONS: Final = (
    "What is this text about? Answer in one sentence.",
    "Name one thing that is described above and say what it returns.",
    "Write a short example that uses it.",
    "What should a beginner know before using this?",
)

SHORT_DOCUMENTS: Final = (
    ("bisect", 90),
    ("calendar", 160),
    ("colorsys", 120),
    ("copy", 210),
    ("csv", 280),
    ("fnmatch", 180),
    ("gzip", 330),
    ("heapq", 420),
)
"""Module whose documentation is asked about, and the length of the document in tokens."""

LONG_DOCUMENTS: Final = (
    ("argparse", 2070),
    ("asyncio", 2120),
    ("decimal", 2180),
    ("email.message", 2240),
    ("logging", 2300),
    ("socket", 2380),
    ("typing", 2460),
    ("zipfile", 2550),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A document as token ids and the prompts that ask about it; every prompt begins with the document."""

    name: str
    head: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


def module_text(name: str) -> str:
    """The docstrings of a module and of what it defines, in the order of their names."""
    module = importlib.import_module(name)
    parts = [f"Documentation of the Python module {name}.", inspect.getdoc(module) or ""]
    for member_name, member in sorted(vars(module).items()):
        if member_name.startswith("_") or not (inspect.isclass(member) or inspect.isroutine(member)):
            continue
        parts.append(f"{member_name}: {inspect.getdoc(member) or ''}")
        if inspect.isclass(member):
            for name_in_class, attribute in sorted(vars(member).items()):
                if inspect.isroutine(attribute) and not name_in_class.startswith("_"):
                    parts.append(f"{member_name}.{name_in_class}: {inspect.getdoc(attribute) or ''}")
    return "\n\n".join(part for part in parts if part)


def document(
    name: str, length: int, questions: Sequence[str], tokenize: Callable[[str], list[int]]
) -> Document:
    """The first `length` tokens of a module's documentation, with one prompt per question.

    `tokenize` turns text with special tokens written out into token ids."""
    head = tuple(tokenize(f"<|im_start|>user\n{module_text(name)}"))[:length]
    tails = [tuple(tokenize(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")) for question in questions]
    return Document(name, head, tuple(head + tail for tail in tails))


def documents(side: str, tokenize: Callable[[str], list[int]]) -> list[Document]:
    """The documents of a side (`short` or `long`), each with one prompt per question."""
    chosen = {"short": SHORT_DOCUMENTS, "long": LONG_DOCUMENTS}[side]
    return [document(name, length, QUESTIONS, tokenize) for name, length in chosen]
