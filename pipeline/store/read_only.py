"""What may be asked of the archive: one statement that reads it and gives rows.

A read-only handle is not enough. ClickHouse obeys `INTO OUTFILE` on it, reads any file with `file()`, and
describing a table function opens connections and even creates files. ClickHouse's own parser judges here: it
writes the statement anew, without comments and with one way of quoting, so words and quoted text cannot be
confused.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from pipeline.store.client import Store
from pipeline.store.errors import QueryError

READING: Final = ("SELECT", "WITH", "SHOW", "DESCRIBE", "EXISTS", "EXPLAIN")
"""First words of statements that give rows, as ClickHouse writes them."""

INSIDE: Final = frozenset(
    {"numbers", "numbers_mt", "zeros", "zeros_mt", "generate_series", "generateseries", "generaterandom"}
    | {"values", "null", "primes", "view", "merge"}
)
"""Table functions that touch nothing outside of the database; of all others none is run."""

OUTSIDE: Final = frozenset(
    {"file", "logtrace", "catboostevaluate", "reversednsquery", "aiclassify", "aiembed", "aiextract"}
    | {"aifilter", "aigenerate", "airedact", "aisimilarity", "aitranslate"}
)
"""Ordinary functions that reach outside. Refused by name alone: `arrayMap(file, …)` is a call as well."""

_EXPECTED: Final = "one SELECT is expected (or SHOW, DESCRIBE, EXISTS, EXPLAIN of a SELECT)"
_PROBE: Final = "\nINTO OUTFILE 'x'"
_EXPLAIN: Final = re.compile(
    r"EXPLAIN (?:(?:PLAN|PIPELINE|SYNTAX|QUERY TREE|ESTIMATE|ANALYZE) )?(?:\w+ = \S+ )*\(*(?:SELECT|WITH)\b"
)
_TOKEN: Final = re.compile(
    r"'(?:\\.|[^'\\])*'"
    r"|`(?P<quoted>(?:\\.|[^`\\])*)`"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<other>\S)",
    re.DOTALL,
)


def readable(store: Store, sql: str) -> str:
    """The statement, ready for a FORMAT clause behind it, if it only reads the archive; blocks.

    Raises QueryError, whose message says what is expected, or StoreUnavailableError. Runs nothing of `sql`.
    """
    try:
        sql.encode()
    except UnicodeEncodeError:
        raise QueryError("the query is not UTF-8") from None
    statement = bare(sql)
    written = _written(store, statement)
    head = re.match(r"[( ]*(\w*)", written)
    first = head.group(1) if head else ""
    words = _words(written)
    if first not in READING:
        raise QueryError(f"{_EXPECTED}, not {first}")
    if "PARALLEL WITH" in words:
        raise QueryError(f"{_EXPECTED}, not several statements")
    if first == "EXPLAIN" and _EXPLAIN.match(words) is None:
        raise QueryError(f"{_EXPECTED}, not {' '.join(words.split()[:2])} of this")
    if "INTO OUTFILE" in words:
        raise QueryError("INTO OUTFILE writes a file; redirect the output of `klaxon sql` instead")
    _refuse_outside(store, written)
    # The output clause may stand once and last: where the probe's parses there is none yet.
    for text in (statement, written):
        if _parses(store, text + _PROBE):
            return text
    raise QueryError("leave FORMAT out; `klaxon sql --json` gives JSON")


def bare(sql: str) -> str:
    """The statement without the blanks and semicolons that end it."""
    return sql.strip().rstrip("; \t\r\n")


def _written(store: Store, statement: str) -> str:
    """The statement as ClickHouse writes it, in one line."""
    try:
        found = store.text(f"SELECT formatQuerySingleLine({_literal(statement)})", "TSVRaw")
    except QueryError as error:
        # What follows quotes our own statement around it.
        message = str(error).partition(": In scope ")[0].rstrip(" :")
        if "Empty query" in message:
            raise QueryError(f"{_EXPECTED}; the query is empty") from None
        if "Multi-statements" in message:
            raise QueryError(f"{_EXPECTED}, not several statements") from None
        raise QueryError(message, error.code) from None
    try:
        return found.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise QueryError(r"the query holds bytes that are not UTF-8; write unhex('FF') for '\xFF'") from None


def _parses(store: Store, text: str) -> bool:
    found = store.text(f"SELECT isNotNull(formatQueryOrNull({_literal(text)}))", "TSVRaw")
    return found.strip() == b"1"


def _words(written: str) -> str:
    """The text with everything quoted replaced by `q`."""
    return _TOKEN.sub(lambda found: found.group() if found["word"] or found["other"] else "q", written)


def _refuse_outside(store: Store, written: str) -> None:
    """Raises QueryError for a function that reaches outside of the database."""
    tokens = [
        ((found["quoted"] or found["word"] or "").lower(), found["other"])
        for found in _TOKEN.finditer(written)
    ]
    for name, _ in tokens:
        if name in OUTSIDE:
            raise QueryError(f"{name}() reaches outside of the archive, which is only read here")
    called = {
        name
        for (name, _), (_, then) in pairwise(tokens)
        if then == "(" and name.isidentifier() and name.isascii() and name not in INSIDE
    }
    if not called:
        return
    names = ", ".join(map(_literal, sorted(called)))
    found = store.text(
        f"SELECT min(lower(name)) FROM system.table_functions WHERE lower(name) IN ({names}) "  # noqa: S608 (identifiers)
        "AND name NOT IN (SELECT name FROM system.functions)",
        "TSVRaw",
    )
    if name := found.decode().strip():
        raise QueryError(f"table function {name}() reaches outside of the archive, which is only read here")


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
