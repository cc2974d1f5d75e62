"""Tables of docs/gateway-configuration.md: `python -m tests.docs.gateway_configuration --write` renews them.

A key's name, bounds and default are the structure's, its meaning is its docstring: said once, in the code.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec.inspect import (
    Field,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)

from agents.gateway import settings as source
from agents.gateway.settings import (
    EmbeddingSettings,
    EngineSettings,
    GatewaySettings,
    HeaderSettings,
    MirrorPaths,
    MirrorSettings,
    PoolSettings,
    PrivacySettings,
    SpanSettings,
)

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "gateway-configuration.md"
BEGIN: Final = "<!-- made by `python -m tests.docs.gateway_configuration --write` -->\n"
END: Final = "<!-- end -->\n"
HEAD: Final = ["key", "what stands there", "default", "meaning"]
TABLES: Final = {
    "gateway": GatewaySettings,
    "gateway.pools[…]": PoolSettings,
    "gateway.pools[…].engines[…]": EngineSettings,
    "gateway.mirror": MirrorSettings,
    "gateway.mirror.paths": MirrorPaths,
    "gateway.headers": HeaderSettings,
    "gateway.privacy": PrivacySettings,
    "gateway.embeddings": EmbeddingSettings,
    "gateway.spans": SpanSettings,
}


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Field → its docstring, in one line."""
    tree = ast.parse(inspect.getsource(source))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    told: dict[str, str] = {}
    name = None
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name is not None and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told[name] = " ".join(str(node.value.value).split())
            name = None
    return told


def _values(held: Type) -> Iterator[str]:
    """What may stand there, as far as the type says."""
    if isinstance(held, UnionType):
        for one in held.types:
            yield from _values(one)
    elif isinstance(held, LiteralType):
        yield ", ".join(f"`{value}`" for value in held.values)
    elif isinstance(held, VarTupleType):
        yield "a list of " + " or ".join(_values(held.item_type))
    elif isinstance(held, IntType | FloatType):
        yield "a number" + _bounds(held)
    elif isinstance(held, StructType):
        yield "keys"
    elif not isinstance(held, NoneType):
        yield {"BoolType": "`true`, `false`"}.get(type(held).__name__, "text")


def _bounds(held: IntType | FloatType) -> str:
    low = "" if held.ge is None and held.gt is None else f"from {held.ge:,}" if held.gt is None else "above 0"
    high = "" if held.le is None else f"to {held.le:,}"
    return f" {low} {high}".rstrip().replace(".0", "").replace(",", " ").replace("  ", " ")


def _default(field: Field) -> str:
    if field.required:
        return "needed"
    value = field.default
    if isinstance(value, msgspec.Struct):
        return ""
    if value is None or value in ("", ()):
        return "absent"
    if isinstance(value, bool):
        return f"`{value}`".lower()
    return f"`[{', '.join(value)}]`" if isinstance(value, tuple) else f"`{value}`"


def tables() -> str:
    """Every structure's table under its place."""
    parts = []
    for place, kind in TABLES.items():
        described = msgspec.inspect.type_info(kind)
        assert isinstance(described, StructType)
        told = meanings(kind)
        rows = []
        for field in described.fields:
            nested = isinstance(field.type, StructType)
            meaning = f"see `{place}.{field.name}` below" if nested else told[field.name]
            rows.append([f"`{field.name}`", " or ".join(_values(field.type)), _default(field), meaning])
        lines = ["| " + " | ".join(row) + " |" for row in [HEAD, *rows]]
        about = " ".join((inspect.getdoc(kind) or "").split())
        parts.append("\n".join([f"## `{place}`\n", f"{about}\n", lines[0], "|---|---|---|---|", *lines[1:]]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The page as it has to be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + tables() + "\n" + END + after


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(tables())
