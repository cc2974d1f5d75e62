"""`--check`, facts and what they say of each other, against llama.cpp itself."""

from __future__ import annotations

import importlib.util

import pytest

from agents.gateway.asking import CHAT, COMPLETIONS
from agents.gateway.checking import check_engines
from pipeline.cli.demo.engines import VARIANTS, EngineError, engine
from tests.agents.gateway.test_checking import codes, pool, settings


@pytest.mark.slow
async def test_llama_cpp_is_checked_as_it_is() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (extra `engines`)")
    try:
        with engine(VARIANTS["baseline"]) as client:
            host, port = client._address
            url = f"http://{host}:{port}"
            checked = await check_engines(settings(pool(url, "llama.cpp"), forced=True), {})
    except EngineError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise
    (found,) = checked.engines
    assert codes(found) == [("forced", False)], found.problems
    assert found.forced == "no"
    assert [(path.path, path.candidates, path.identity) for path in found.paths] == [
        (CHAT, 5, "ids"),
        (COMPLETIONS, 5, "ids"),
    ]
    assert all(path.ttft_us for path in found.paths)
    facts = found.facts
    assert facts.label.startswith("llama.cpp b")
    assert facts.label.endswith(" mode=raw")
    assert (facts.definition, facts.context_tokens, facts.complete) == ("raw", 4096, True)
    assert facts.model is not None
    assert facts.model.endswith(".gguf")
