"""Which parser a model's answers have, and constraints after its thoughts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jengine import StructuredOutputs, Tokenizer
from jengine.serving.parsers.events import Arguments, Content, Reasoning, ToolCallStart
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.parsers.json_calls import NamedCall
from jengine.serving.parsers.tagged import KIMI
from jengine.spi import after_thought
from jengine.text.grammars import compile_structure
from tests.serving.test_parsers import BEGIN, CALL, CALL_END, END, FINAL, SEP, parsed
from tests.text.conftest import byte_level, write

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    }
]


def format_of(folder: Path, template: str, **options: str) -> AnswerFormat:
    (folder / "chat_template.jinja").write_text(template)
    return AnswerFormat(Tokenizer.load(folder), **options)


@pytest.mark.parametrize(
    "mark, text",
    [
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of',
            '{"name": "f", "parameters": {}}',
        ),
        ("[func_name1(params_name1=", "[f()]"),
        (BEGIN, f"{BEGIN}{CALL}f{SEP}{{}}{CALL_END}{END}"),
        (
            KIMI.begin,
            f"{KIMI.begin}{KIMI.call}functions.f:0<|tool_call_argument_begin|>{{}}{KIMI.call_end}{KIMI.end}",
        ),
        ("<tool_call> <arg_key>", "<tool_call>f</tool_call>"),
        ("<minimax:tool_call>", '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>'),
        ("<tool_call> <function= <parameter=", "<tool_call><function=f></function></tool_call>"),
    ],
)
def test_the_chat_template_tells_the_format(tmp_path: Path, mark: str, text: str) -> None:
    form = format_of(write(byte_level(), tmp_path), f"{{# {mark} #}}{{{{ tools }}}}")
    assert form.tools and parsed(form.parser("", TOOLS), text) == [ToolCallStart(0, "f"), Arguments(0, "{}")]
    assert parsed(form.parser("", []), text) == [Content(text)], "without tools there are no calls"
    assert form.shows_special_tokens == (mark in ("[TOOL_CALLS]", BEGIN, KIMI.begin))


def test_what_the_chat_template_does_not_tell(tmp_path: Path) -> None:
    folder = write(byte_level(), tmp_path)
    assert not format_of(folder, "{{ tools }}").tools
    assert format_of(folder, "{{ tools }}", tool_parser="hermes").tools
    assert not format_of(folder, "{# <tool_call> #}{{ tools }}", tool_parser="none").tools


def test_reasoning_depends_on_the_prompt(tmp_path: Path) -> None:
    folder = write(byte_level(), tmp_path)
    qwen, r1 = format_of(folder, "{# </think> #}{{ enable_thinking }}"), format_of(folder, "{# </think> #}")
    text = "so\n</think>\n\nyes"
    assert parsed(qwen.parser("<|assistant|>\n", []), text) == [Content(text)]
    assert parsed(qwen.parser("<|assistant|>\n", []), "<think>" + text) == [Reasoning("so"), Content("yes")]
    thought = [Reasoning("so"), Content("yes")]
    assert parsed(qwen.parser("<think>\n", []), text) == parsed(r1.parser("<think>\n", []), text) == thought
    assert parsed(r1.parser("", []), "yes") == [Content("yes")], "a template that only removes thoughts"
    opened = format_of(folder, "{# </think> #}", reasoning_parser="deepseek_r1")
    assert parsed(opened.parser("", []), text) == thought
    assert parsed(r1.parser("<think>\n\n</think>\n\n", []), "yes") == [Content("yes")], (
        "the prompt has ended it"
    )
    assert parsed(r1.parser("", [], thinks=False), "{}") == [Content("{}")], "a grammar leaves no room for it"
    none = format_of(folder, "{# </think> #}", reasoning_parser="none")
    assert parsed(none.parser("", []), text) == [Content(text)]


def matches(what: StructuredOutputs, tokenizer: Tokenizer, text: str) -> bool:
    matcher = compile_structure(what, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "what, good, bad",
    [
        (
            {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            '{"a": 1}',
            "{}",
        ),
        ({"json": '{"type": "integer"}'}, "12", '"a"'),
        ({"regex": "a/b\\/c+"}, "a/b/cc", "a"),
        ({"choice": ["yes", 'n"o']}, 'n"o', "maybe"),
        ({"grammar": 'start: "{" text "}"\ntext: /[a-c]{1,2}/'}, "{ab}", "{d}"),
    ],
)
def test_grammars_begin_after_the_reasoning(
    tokenizer_folder: Path, what: dict[str, Any], good: str, bad: str
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    inside, free = (after_thought(StructuredOutputs(**what), begins) for begins in (True, False))
    for text, in_it, out_of_it in (
        ("hm { <x\n</think>\n\n", True, False),
        ("<think>hm</think>", True, True),
        ("", False, True),
    ):
        assert (
            matches(inside, tokenizer, text + good) is in_it
            and matches(free, tokenizer, text + good) is out_of_it
        )
        assert not matches(inside, tokenizer, text + bad) and not matches(free, tokenizer, text + bad)


def test_forced_calls_after_reasoning(tmp_path: Path) -> None:
    form = format_of(write(byte_level(), tmp_path), "{# </think> #}")
    assert parsed(form.parser("<think>", TOOLS, True, NamedCall("f")), 'hm</think>\n{"a": 1}') == [
        Reasoning("hm"),
        ToolCallStart(0, "f"),
        Arguments(0, '{"a": 1}'),
    ]


def test_answers_in_channels_show_their_special_tokens(tmp_path: Path) -> None:
    form = format_of(write(byte_level(), tmp_path), "{{ '<|channel|>analysis<|message|>' }}")
    assert (
        form.channels
        and form.tools
        and form.shows_special_tokens
        and form.reasoning("<|start|>assistant") is None
    )
    text = f"<|channel|>analysis<|message|>hm<|end|>{FINAL}4"
    assert parsed(form.parser("", [], True), text) == [Reasoning("hm"), Content("4")]
    called = [ToolCallStart(0, "f"), Arguments(0, '{"a": 1}')]
    call = '<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>'
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    assert parsed(form.parser("", TOOLS, True, NamedCall("f")), thought + call) == [Reasoning("hm"), *called]
    whole = parsed(form.parser("", TOOLS, False, NamedCall("f")), '{"a": 1}')
    assert whole == called, "a message is continued"


@pytest.mark.parametrize(
    "mark, call",
    [
        ("<parameter=", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("<tool_call>", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (KIMI.begin, f"{KIMI.begin}{KIMI.call}functions.f:0{KIMI.separator}{{}}{KIMI.call_end}{KIMI.end}"),
    ],
)
@pytest.mark.parametrize("end", ["", "</think>"])
def test_a_call_ends_a_thought(tmp_path: Path, mark: str, call: str, end: str) -> None:
    made = format_of(write(byte_level(), tmp_path), f"{{# </think> {mark} #}}{{{{ enable_thinking }}}}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    got = parsed(made.parser("<think>\n", tools), f"I need it.{end}\n\n{call}")
    assert got == [Reasoning("I need it."), ToolCallStart(0, "f"), Arguments(0, "{}")]
    text = f"I need it.\n\n{call}"
    assert parsed(made.parser("<think>\n", []), text) == [Reasoning(text)], "nothing can be called"


def test_a_thought_may_name_a_call(tmp_path: Path) -> None:
    made = format_of(write(byte_level(), tmp_path), "{# </think> <tool_call> #}{{ enable_thinking }}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    thought = "I answer within <tool_call></tool_call> tags, <tool_call> first.\nSo it is f."
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    expected = [Reasoning(thought), ToolCallStart(0, "f"), Arguments(0, "{}")]
    for end in "</think>\n\n", "\n":
        text = f"{thought}{end}{call}"
        for pieces in ([text], [*text]):
            assert parsed(made.parser("<think>\n", tools), *pieces) == expected
