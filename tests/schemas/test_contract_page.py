"""The page for producers says what the code does."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from schemas import codec
from schemas.events import EngineGauges, FeedbackEvent, Gpu, LogitEvent, NodeEvent, RequestEvent
from schemas.signature import prompt_signature
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "events.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("event", [RequestEvent, LogitEvent, NodeEvent, FeedbackEvent, Gpu, EngineGauges])
def test_every_field_is_on_the_page(event: type[msgspec.Struct]) -> None:
    missing = [
        field.name
        for field in msgspec.structs.fields(event)
        if not re.search(rf"[`{{, \n]{field.name}[`*,}}\n]", PAGE)
    ]
    assert missing == []


def test_required_fields_are_marked() -> None:
    for event in (RequestEvent, LogitEvent, FeedbackEvent):
        for field in msgspec.structs.fields(event):
            if field.required:
                assert f"`{field.name}`*" in PAGE, field.name


def test_the_example_answer_is_accepted() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    decoded = codec.decode_logits(block.encode(), None)
    assert (decoded.columns.n, decoded.rejected) == (1, ())


def test_the_kcat_example_is_accepted() -> None:
    (text,) = re.findall(r"echo '(\{.*\})' \|", PAGE)
    event = text.replace("'$(date +%s)000000'", "1767225600000000")
    assert json.loads(event)["signature"] in re.findall(r"-k (\w+)", PAGE)
    decoded = codec.decode_requests(event.encode(), None)
    assert (decoded.columns.n, decoded.rejected) == (1, ())


def test_the_signature_on_the_page_is_ours() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict = {}
    exec(block, scope)  # the page's own code
    arguments = (bytes(16), "chat", ["user", "hé"], {"temperature": 0.7, "max_tokens": 12})
    assert scope["signature"](*arguments) == prompt_signature(*arguments)


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(\.\./([^)]+)\)", PAGE):
        assert (REPOSITORY / target).exists(), target
