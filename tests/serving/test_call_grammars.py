"""Answers that are calls in the model's format or follow a schema: what the grammar of each format allows,
its parser reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from jengine import InvalidArgument, StructuredOutputs, Tokenizer
from jengine.serving.http.blocks import Blocks
from jengine.serving.http.parameters import ToolChoice
from jengine.serving.parsers.events import OutputParser, joined
from jengine.serving.parsers.formats import TOOL_FORMATS, AnswerFormat
from jengine.serving.parsers.json_formats import LlamaJson
from jengine.serving.parsers.tagged import DEEPSEEK, KIMI
from jengine.spi import calls_or_text, forced_in_channels, plain_calls_or_text
from jengine.text.call_grammars import CALL_RULES
from jengine.text.grammars import compile_structure
from tests.serving.test_response_template import TEMPLATE
from tests.serving.test_tool_conversations import TOOLS, WRITTEN, Calls
from tests.text.conftest import byte_level, write

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "additionalProperties": False,
}
SCHEMAS = dict.fromkeys(("weather", "news"), PARAMETERS)
ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WHAT = StructuredOutputs(json={**ANSWER, "additionalProperties": False})
ONE: Calls = [("weather", {"city": "Bonn's", "days": 7})]
TWO: Calls = [*ONE, ("news", {"city": 'a "b"', "days": 3})]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"]
MARKS += ["</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]", "[ARGS]"]
MARKS += ["<|python_tag|>", "<|python_start|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
MARKS += ["<|call|>", "<|constrain|>"]
MARKS += [DEEPSEEK.begin, DEEPSEEK.end, DEEPSEEK.call, DEEPSEEK.call_end, DEEPSEEK.separator]
MARKS += [KIMI.begin, KIMI.end, KIMI.call, KIMI.call_end, KIMI.separator]


@pytest.fixture(scope="module", params=["tokens", "texts"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Models have most markers as tokens, special or not."""
    backend = byte_level()
    if request.param == "tokens":
        tokens = [AddedToken(mark, special=i % 2 == 0, normalized=False) for i, mark in enumerate(MARKS)]
        backend.add_tokens(tokens)
    return Tokenizer(backend, {"eos_token": "</s>"})


def accepts(what: StructuredOutputs | None, text: str, tokenizer: Tokenizer) -> bool:
    assert what is not None
    matcher = compile_structure(what, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(form: str, calls: Calls) -> str:
    if form == "plain":
        return json.dumps([{"name": name, "parameters": parameters} for name, parameters in calls])
    text = WRITTEN[form]("", calls).lstrip("\n")
    # a message of harmony has one call, and no preamble without text
    return text.removeprefix("<|channel|>commentary<|message|><|end|><|start|>assistant")


def read(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The answer's text and its calls."""
    parser: OutputParser = LlamaJson(TOOLS) if form == "plain" else TOOL_FORMATS[form].parser(TOOLS)
    blocks = Blocks(joined([*parser.push(text), *parser.finish()]))
    calls = [(block.name, json.loads(block.text)) for block in blocks.all if block.kind == "call"]
    return blocks.text("text"), calls


def final(form: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if form == "harmony" else text


def thought(form: str) -> str:
    if form == "harmony":
        return "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    return "hm</think>\n\n"


def test_every_format_has_a_grammar() -> None:
    assert CALL_RULES.keys() == {*TOOL_FORMATS, "plain"}


@pytest.mark.parametrize("form", CALL_RULES)
def test_calls_or_a_schema(form: str, tokenizer: Tokenizer) -> None:
    for inside, before in ((None, ""), (True, thought(form))):
        what = calls_or_text(form, SCHEMAS, True, WHAT, inside)
        for calls in (ONE,) if form == "harmony" else (ONE, TWO):
            assert accepts(what, before + written(form, calls), tokenizer)
            assert read(form, written(form, calls)) == ("", calls)
        assert accepts(what, before + final(form, '{"a": 5}'), tokenizer)
        assert read(form, final(form, '{"a": 5}')) == ('{"a": 5}', [])
        for text in ("Hello.", '{"a": "x"}', "", final(form, written(form, [("other", {"days": 3})]))):
            assert not accepts(what, before + text, tokenizer), text
        unknown = written(form, ONE).replace("weather", "whether")
        assert not accepts(what, before + unknown, tokenizer)
        assert not accepts(what, before + " " * 101 + final(form, '{"a": 5}'), tokenizer)


def test_calls_or_any_text(tokenizer: Tokenizer) -> None:
    """What begins as a call of a known tool is one; everything else is text."""
    array, one = written("plain", TWO), written("plain", ONE)[1:-1]
    texts = "", "It rains.\n", "[1, 2]", '[{"name": "whether"}]', '{"name": "Ann"}', "```json\n[]\n```"
    wrong = array[:-2], array.replace("days", "date"), array.replace("3", '"x"'), '[{"name": "weather"}]'
    for inside, before in ((None, ""), (True, thought("plain"))):
        what = plain_calls_or_text(SCHEMAS, True, inside)
        for text in (array, one, f"```json\n{array}\n```", f"```\n{one}\n```"):
            assert accepts(what, before + text, tokenizer), text
            assert read("plain", text)[1], text
        for text in texts:
            assert accepts(what, before + text, tokenizer), text
            assert read("plain", text) == (text, []), text
        assert not any(accepts(what, before + text, tokenizer) for text in wrong)
    assert not accepts(plain_calls_or_text(SCHEMAS, False), array, tokenizer)


def test_a_schema_that_is_supported_in_part_prevents_no_text(tokenizer: Tokenizer) -> None:
    properties = {
        "days": {"type": "array", "uniqueItems": True},
        "city": {"not": {"type": "null"}},
        "pattern": {"type": "string", "pattern": r"^(?!\.)[a-z.]+@\w+\b"},
    }
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    with pytest.raises(InvalidArgument):
        accepts(ToolChoice(tools, tools, "required", True).structure(None), "It rains.", tokenizer)
    assert accepts(ToolChoice(tools, tools, None, True, True).or_any_text(None), "It rains.", tokenizer)


@pytest.mark.parametrize(
    "unread",
    [
        {"type": "string", "pattern": r"^[^[]+$"},
        {"type": "string", "pattern": r"(a)\1\Z"},
        {"type": "object", "required": None},
        {"type": "object", "additionalProperties": None},
        {"type": "any"},
        {"$ref": "#/$defs/nowhere"},
    ],
)
def test_a_schema_that_cannot_be_read_prevents_no_text(unread: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Of the tools, only that one's arguments may then be others."""
    days = {"type": "integer"}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}
        for name, parameters in (
            ("odd", {"properties": {"a": unread, "days": days}}),
            ("weather", {"properties": {"days": days}}),
        )
    ]
    what = ToolChoice(tools, tools, None, True, True).or_any_text(None)
    assert accepts(what, "It rains.", tokenizer)
    for name, value, accepted in (("odd", 3, True), ("weather", 3, True), ("weather", "x", False)):
        call = json.dumps([{"name": name, "parameters": {"days": value}}])
        assert accepts(what, call, tokenizer) is accepted, call
    # without its patterns, the schema can be read
    call = json.dumps([{"name": "odd", "parameters": {"a": "b", "days": "x"}}])
    assert accepts(what, call, tokenizer) is ("pattern" not in unread)


@pytest.mark.parametrize("form", CALL_RULES)
def test_one_call(form: str, tokenizer: Tokenizer) -> None:
    what = calls_or_text(form, SCHEMAS, False, WHAT)
    assert accepts(what, written(form, ONE), tokenizer)
    assert not accepts(what, written(form, TWO), tokenizer)


@pytest.mark.parametrize(
    "form, text",
    [
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]news[ARGS]{"city": "Bonn"}'),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Bonn"}'),
        (
            "deepseek",
            f'{DEEPSEEK.begin}{DEEPSEEK.call}weather{DEEPSEEK.separator}{{"city": "Bonn"}}{DEEPSEEK.call_end}'
            f"{DEEPSEEK.end}",
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>',
        ),
        ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn"}}'),
        ("pythonic", "[weather(city='Bonn'), news()]"),
        ("pythonic", "[weather(city='Bonn', days={'a': [1, -2.5, True, None]})]"),
        ("glm45", "<tool_call>weather\n</tool_call>"),
    ],
)
def test_other_ways_to_write_a_call(form: str, text: str, tokenizer: Tokenizer) -> None:
    assert accepts(calls_or_text(form, SCHEMAS, True, WHAT), text, tokenizer)
    said, calls = read(form, text)
    assert calls and not said


def test_reasoning_in_channels_without_tools(tokenizer: Tokenizer) -> None:
    what = calls_or_text("harmony", {}, True, WHAT)
    text = final("harmony", '{"a": 5}')
    assert accepts(what, text, tokenizer) and accepts(what, thought("harmony") + text, tokenizer)
    assert not accepts(what, '{"a": 5}', tokenizer)
    assert not accepts(what, written("harmony", ONE), tokenizer)


@pytest.mark.parametrize(
    "what",
    [
        StructuredOutputs(regex="a/b+"),
        StructuredOutputs(choice=["a/b", "c"]),
        StructuredOutputs(grammar='start: "a" call\ncall: "/b"'),
    ],
)
def test_other_constraints(what: StructuredOutputs, tokenizer: Tokenizer) -> None:
    either = calls_or_text("hermes", SCHEMAS, True, what)
    assert accepts(either, "a/b", tokenizer) and accepts(either, written("hermes", TWO), tokenizer)
    assert not accepts(either, "b", tokenizer)


def test_a_format_without_a_grammar_excludes_schemas(tmp_path: Path) -> None:
    """One that the tokenizer's response_template describes."""
    folder = write(byte_level(), tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": TEMPLATE}))
    form = AnswerFormat(Tokenizer.load(folder))
    assert form.tools and form.calls is None
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with pytest.raises(InvalidArgument, match=r"tool_choice='auto': .* has no grammar"):
        ToolChoice(tools, tools, None, True).or_text(WHAT, form, None)


def test_an_error_in_a_lark_grammar_shows_it_alone(tokenizer: Tokenizer) -> None:
    wrong = StructuredOutputs(grammar='start: "a"\nx: (')
    with pytest.raises(InvalidArgument, match=r"='start: \"a\"\\nx: \(': .* 2\(5\)"):
        compile_structure(calls_or_text("hermes", SCHEMAS, True, wrong, True), tokenizer)
    tool = {"weather": {**PARAMETERS, "properties": {"n": {"$ref": "#/$defs/None"}}}}
    with pytest.raises(InvalidArgument, match=r"tools\[0\]"):
        compile_structure(
            calls_or_text("hermes", tool, True, StructuredOutputs(grammar='start: "a"')), tokenizer
        )


@pytest.mark.parametrize("what", [None, StructuredOutputs(json=PARAMETERS)])
def test_forced_calls_in_channels(what: StructuredOutputs | None, tokenizer: Tokenizer) -> None:
    schemas = SCHEMAS if what is None else {"weather": PARAMETERS}
    forced = forced_in_channels(schemas, what)
    for before in ("", thought("harmony")):
        assert accepts(forced, before + written("harmony", ONE), tokenizer)
        assert not accepts(forced, before + final("harmony", "yes"), tokenizer)
        assert not accepts(forced, before + json.dumps(ONE[0][1]), tokenizer)
    news = written("harmony", [("news", {"days": 3})])
    assert accepts(forced, news, tokenizer) is (what is None)
    assert not accepts(forced, written("harmony", [("weather", {"days": "3"})]), tokenizer)
