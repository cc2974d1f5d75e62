"""The child process of one llama.cpp engine: serves until its standard input is closed."""

from __future__ import annotations

import json
import sys
from operator import attrgetter
from typing import Any, Final

import xllamacpp

_ENUMS: Final = {
    "LLAMA_ROPE_SCALING_TYPE_": xllamacpp.llama_rope_scaling_type,
    "LLAMA_FLASH_ATTN_TYPE_": xllamacpp.llama_flash_attn_type,
    "GGML_TYPE_": xllamacpp.ggml_type,
}


def _value(raw: Any) -> Any:
    """Names of llama.cpp's enum members become the members; everything else is as it is."""
    if isinstance(raw, str):
        for prefix, members in _ENUMS.items():
            if raw.startswith(prefix):
                return getattr(members, raw)
    return raw


def serve(task: dict[str, Any]) -> None:
    """Start the engine that `task` describes and block until the parent goes away."""
    params = xllamacpp.CommonParams()
    settings = {
        "model.path": task["model"],
        "hostnames": ["127.0.0.1"],
        "port": task["port"],
        "n_ctx": task["n_ctx"],
        "n_parallel": 1,
        "cpuparams.n_threads": task["threads"],
        "cpuparams_batch.n_threads": task["threads"],
        "warmup": False,
        **task["settings"],
    }
    for path, raw in settings.items():
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(params) if owner else params, name, _value(raw))
    server = xllamacpp.Server(params)
    sys.stdin.buffer.read()
    del server


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
