"""A tokenizer's response_template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jengine import ModelError
from jengine.serving.parsers.events import Arguments, Content, Reasoning, ToolCallStart
from jengine.serving.parsers.formats import ResponseTemplate
from tests.serving.test_formats import TOOLS, format_of
from tests.serving.test_parsers import parsed
from tests.text.conftest import byte_level, write

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
ANSWER = "<t>hm</t>Well<call f><n>3</n></call><call g><n>3</n></call>"
FOUND = [
    Reasoning("hm"),
    Content("Well"),
    ToolCallStart(0, "f"),
    Arguments(0, '{"n": 3}'),
    ToolCallStart(1, "g"),
    Arguments(1, '{"n": "3"}'),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_response_template_reads_streams(size: int) -> None:
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    assert parsed(ResponseTemplate(TEMPLATE, "<|assistant|>", TOOLS), *pieces) == FOUND


def test_a_response_template_comes_with_the_tokenizer(tmp_path: Path) -> None:
    folder = write(byte_level(), tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": TEMPLATE}))
    form = format_of(folder, "{{ tools }}")
    assert (
        form.tools
        and form.shows_special_tokens
        and parsed(form.parser("<|assistant|>", TOOLS), ANSWER) == FOUND
    )
    assert isinstance(form.parser("<|assistant|>", TOOLS), ResponseTemplate)
    assert parsed(form.parser("<|assistant|>", TOOLS, thinks=False), "{}") == [Content("{}")], (
        "what a grammar has forced is no conversation's answer"
    )


def test_a_response_template_that_is_none(tmp_path: Path) -> None:
    folder = write(byte_level(), tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": {"fields": {}}}))
    with pytest.raises(ModelError, match=r"response_template cannot be used: .*--tool-call-parser"):
        format_of(folder, "")
    assert format_of(folder, "", tool_parser="hermes").tools


BROKEN = ("{broken", '["x"]', '"x"', '{"name": null}', '{"function": "f"}', '{"name": 1}', '{"a": 1}')


@pytest.mark.parametrize("call", BROKEN)
def test_what_a_response_template_cannot_read_is_content(call: str) -> None:
    json_calls = {
        **TEMPLATE,
        "fields": {**TEMPLATE["fields"], "tool_calls": {"open": "<c>", "close": "</c>", "content": "json"}},
    }  # type: ignore[dict-item]
    whole = f"<c>{call}</c>"
    for pieces in ([whole], ["<c>", call, "</c>"], ["<c>", call[:3], call[3:] + "</c>"]):
        [content] = parsed(ResponseTemplate(json_calls, "<|assistant|>", TOOLS), *pieces)
        assert isinstance(content, Content) and content.text == whole[len(whole) - len(content.text) :]
        assert content.text.count(call) == 1
    begun = ResponseTemplate(json_calls, "<|assistant|><c>{broken</c>", TOOLS)
    assert parsed(begun, whole) == [Content(whole)], "after a beginning that cannot be read either"
