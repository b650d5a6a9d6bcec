"""Tool calls and reasoning in models' texts, whole and in arbitrary pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine import StructuredOutputs, Tokenizer
from jengine.serving.parsers.events import (
    Arguments,
    Content,
    Event,
    OutputParser,
    PlainText,
    Reasoning,
    ToolCallStart,
    joined,
)
from jengine.serving.parsers.forced import CallArray, NamedCall
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.parsers.harmony import Harmony
from jengine.serving.parsers.hermes import Hermes
from jengine.serving.parsers.llama import LlamaJson
from jengine.serving.parsers.marked import DEEPSEEK, KIMI, MarkedCalls
from jengine.serving.parsers.mistral import Mistral
from jengine.serving.parsers.pythonic import Pythonic
from jengine.serving.parsers.reasoning import Reasons
from jengine.serving.parsers.thoughts import after_reasoning
from jengine.text.grammars import compile_structure
from tests.text.conftest import byte_level, write

NAMES = {"f", "g"}
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "harmony": lambda: Harmony(NAMES),
    "hermes": Hermes,
    "llama3_json": lambda: LlamaJson(NAMES),
    "mistral": Mistral,
    "pythonic": lambda: Pythonic(NAMES),
    "qwen3": lambda: Reasons(Hermes(), inside=False),
    "deepseek_r1": lambda: Reasons(PlainText(), inside=True),
    "deepseek": lambda: MarkedCalls(DEEPSEEK),
    "kimi_k2": lambda: MarkedCalls(KIMI),
    "named": lambda: NamedCall("f"),
    "required": CallArray,
}
ARGUMENTS = '{"a": [1, {"b": "}]\\" </tool_call>"}], "c": null}'
BEGIN, END, CALL, CALL_END, SEP = (
    DEEPSEEK.begin,
    DEEPSEEK.end,
    DEEPSEEK.call,
    DEEPSEEK.call_end,
    "<\uff5ctool▁sep\uff5c>",
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CASES: list[tuple[str, str, list[Event]]] = [
    (
        "harmony",
        f"<|channel|>analysis<|message|>hm < 2\n<|end|>{FINAL}It is\n4.<|return|>",
        [Reasoning("hm < 2\n"), Content("It is\n4.")],
    ),
    (
        "harmony",
        (
            "<|channel|>analysis<|message|>I"
            " call.<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "Wait.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.f <|constrain|>json<|message|>{"a": "<|"}<|call|><|start|>assistant'
            " to=functions.g<|channel|>commentary json<|message|><|call|>"
        ),
        [
            Reasoning("I call."),
            Content("Wait."),
            ToolCallStart(0, "f"),
            Arguments(0, '{"a": "<|"}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    (
        "harmony",
        f"<|channel|>commentary to=python code<|message|>1 + 1<|call|>{FINAL}2",
        [Reasoning("1 + 1"), Content("2")],
    ),
    ("harmony", f"<|channel|>analysis<|message|>no end{FINAL}so", [Reasoning("no end"), Content("so")]),
    ("harmony", "<|channel|>analysis<|mess", []),
    ("harmony", '{"answer": 4} <|en', [Content('{"answer": 4} <|en')]),
    ("harmony", " t", [Content(" t")]),
    (
        "deepseek",
        (
            f'Well\n\n{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": "}}"}}\n```{CALL_END}\n'
            f"{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}{END}"
        ),
        [
            Content("Well"),
            ToolCallStart(0, "f"),
            Arguments(0, '{"a": "}"}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    (
        "deepseek",
        f"{BEGIN}{CALL}f{SEP}{ARGUMENTS}{CALL_END}{END} so",
        [ToolCallStart(0, "f"), Arguments(0, ARGUMENTS), Content("so")],
    ),
    ("deepseek", f"a {BEGIN}{CALL}no call{CALL_END}", [Content(f"a {CALL}no call{CALL_END}")]),
    ("deepseek", f"a {BEGIN[:8]}", [Content(f"a {BEGIN[:8]}")]),
    (
        "kimi_k2",
        (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":'
            " 1}<|tool_call_end|>"
            "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        [ToolCallStart(0, "f"), Arguments(0, '{"a": 1}'), ToolCallStart(1, "g"), Arguments(1, "{}")],
    ),
    (
        "kimi_k2",
        f'{KIMI.begin}{KIMI.call}functions.f:0<|tool_call_argument_begin|>{{"a',
        [ToolCallStart(0, "f"), Arguments(0, '{"a')],
    ),
    ("hermes", "plain < text \n\n", [Content("plain < text \n\n")]),
    (
        "hermes",
        (
            f'Well\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
            '<tool_call>{"arguments": null, "name":"g"}</tool_call>\n'
        ),
        [
            Content("Well"),
            ToolCallStart(0, "f"),
            Arguments(0, ARGUMENTS),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":1}</tool_call> x',
        [ToolCallStart(0, "f"), Arguments(0, '{"a":1}'), Content("x")],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}',
        [ToolCallStart(0, "f"), Arguments(0, '{"a":1}')],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a', [ToolCallStart(0, "f"), Arguments(0, '{"a')]),
    (
        "hermes",
        'a <tool_call>nope {"name": "f"}</tool_call> b',
        [Content('a <tool_call>nope {"name": "f"}</tool_call> b')],
    ),
    ("hermes", '<tool_call> {"answer": 4}</tool_call>', [Content('<tool_call> {"answer": 4}</tool_call>')]),
    ("hermes", "x <tool_call>  ", [Content("x <tool_call>  ")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": [1,2]}}; {"type": "function", "name":"g","parameters":{}}',
        [ToolCallStart(0, "f"), Arguments(0, '{"x": [1,2]}'), ToolCallStart(1, "g"), Arguments(1, "{}")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name":"f","parameters":{"x":1}}',
        [ToolCallStart(0, "f"), Arguments(0, '{"x":1}')],
    ),
    (
        "llama3_json",
        '{"name":"f"} and text',
        [ToolCallStart(0, "f"), Arguments(0, "{}"), Content("and text")],
    ),
    ("llama3_json", ' {"answer": 4}', [Content(' {"answer": 4}')]),
    ("llama3_json", '{"name": "other", "parameters": {}}', [Content('{"name": "other", "parameters": {}}')]),
    ("llama3_json", " hello ", [Content(" hello ")]),
    ("llama3_json", '{"name": "f', [Content('{"name": "f')]),
    (
        "mistral",
        'Well [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [
            Content("Well"),
            ToolCallStart(0, "f"),
            Arguments(0, '{"a": 1}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f{"a": "}"}[TOOL_CALLS]g[CALL_ID]123[ARGS]{} tail',
        [
            ToolCallStart(0, "f"),
            Arguments(0, '{"a": "}"}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
            Content("tail"),
        ],
    ),
    ("mistral", "a [TOOL_CALLS] x y z{", [Content("a [TOOL_CALLS] x y z{")]),
    ("mistral", "[TOOL_CALLS][1,2]", [Content("[TOOL_CALLS][1,2]")]),
    ("mistral", "[TOOL", [Content("[TOOL")]),
    (
        "pythonic",
        '[f(a=1, b="x)]", c={"k": [true, None]}), g()]',
        [
            ToolCallStart(0, "f"),
            Arguments(0, '{"a": 1, "b": "x)]", "c": {"k": [true, null]}}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    ("pythonic", "[1, 2, 3]", [Content("[1, 2, 3]")]),
    ("pythonic", "[link](http://x)", [Content("[link](http://x)")]),
    ("pythonic", "[f(1)]", [Content("[f(1)]")]),
    ("pythonic", "[h(a=1)]", [Content("[h(a=1)]")]),
    ("pythonic", "[f(a=", [Content("[f(a=")]),
    (
        "pythonic",
        "[f(a=" + "(" * 5000 + ")" * 5000 + ")]",
        [Content("[f(a=" + "(" * 5000 + ")" * 5000 + ")]")],
    ),
    (
        "qwen3",
        '<think>\nI <tool\n\n</think>\n\nhello <tool_call>{"name":"f"}</tool_call>',
        [Reasoning("I <tool"), Content("hello"), ToolCallStart(0, "f"), Arguments(0, "{}")],
    ),
    ("qwen3", "no thoughts </think>", [Content("no thoughts </think>")]),
    ("qwen3", "<thi", [Content("<thi")]),
    ("qwen3", "<think></think>x", [Content("x")]),
    ("deepseek_r1", "I think\n</think>\n\nok", [Reasoning("I think"), Content("ok")]),
    ("deepseek_r1", "<think>abc</think>\nok", [Reasoning("abc"), Content("ok")]),
    ("deepseek_r1", "never ends\n", [Reasoning("never ends\n")]),
    ("hermes", '<tool_call>{"name": "f\\ud800"}</tool_call>', [ToolCallStart(0, "f?"), Arguments(0, "{}")]),
    ("pythonic", '[f(a="\\ud800")]', [ToolCallStart(0, "f"), Arguments(0, '{"a": "?"}')]),
    ("named", '{"a": 1}', [ToolCallStart(0, "f"), Arguments(0, '{"a": 1}')]),
    (
        "required",
        '[{"name": "f", "parameters": {"a": 1}}, {"name":"g","parameters":{}}]',
        [ToolCallStart(0, "f"), Arguments(0, '{"a": 1}'), ToolCallStart(1, "g"), Arguments(1, "{}")],
    ),
]


def parsed(parser: OutputParser, *pieces: str) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize("name, text, events", CASES)
def test_whole(name: str, text: str, events: list[Event]) -> None:
    assert parsed(PARSERS[name](), text) == events
    assert parsed(PARSERS[name](), *text) == events, "character by character"


MARKS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "[f(a=1", ")]",
]  # fmt: skip
MARKS += [BEGIN, END, CALL, CALL_END, SEP, KIMI.begin, KIMI.end, KIMI.call, KIMI.call_end]
JSON = [
    '{"name": "f", ', '"arguments": ', '"parameters": {}', "{", "}", "[", "]", '"', ",", ";", "\\", "null",
]  # fmt: skip
FRAGMENTS = st.sampled_from([*MARKS, *JSON, " ", "\n", "f", "g", "<", "x=", "'"])


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.lists(st.integers(0, 60), max_size=12),
)
def test_cuts_change_nothing(name: str, text: str, places: list[int]) -> None:
    assert parsed(PARSERS[name](), *cut(text, places)) == parsed(PARSERS[name](), text)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 150), max_size=12))
def test_cuts_of_what_models_write_change_nothing(
    case: tuple[str, str, list[Event]], places: list[int]
) -> None:
    name, text, events = case
    assert parsed(PARSERS[name](), *cut(text, places)) == events


@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "pythonic"]),
    st.lists(FRAGMENTS, max_size=8).map("".join),
)
def test_no_text_is_lost_where_there_is_no_call(name: str, text: str) -> None:
    events = parsed(PARSERS[name](), text)
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert events == ([Content(text)] if text else [])


def test_arguments_come_before_their_end() -> None:
    parser = Hermes()
    parser.push('<tool_call>{"name": "f", "arguments": ')
    assert parser.push('{"city": "Bo') == [Arguments(0, '{"city": "Bo')]


def test_long_arguments_take_linear_time() -> None:
    """Rebuilding the string for each character would take minutes."""
    text = json.dumps({"a": "x" * 2_000_000})
    assert parsed(Hermes(), f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>') == [
        ToolCallStart(0, "f"),
        Arguments(0, text),
    ]


# --- which parser ---------------------------------------------------------------------------------

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
    assert form.tools and form.read(text, "", TOOLS) == [ToolCallStart(0, "f"), Arguments(0, "{}")]
    assert form.read(text, "", []) == [Content(text)], "without tools there are no calls"
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
    assert qwen.read(text, "<|assistant|>\n", []) == [Content(text)]
    assert qwen.read("<think>" + text, "<|assistant|>\n", []) == [Reasoning("so"), Content("yes")]
    assert qwen.read(text, "<think>\n", []) == r1.read(text, "", []) == [Reasoning("so"), Content("yes")]
    assert r1.read("yes", "<think>\n\n</think>\n\n", []) == [Content("yes")], "the prompt has ended it"
    assert r1.read("{}", "", [], thinks=False) == [Content("{}")], "a grammar leaves no room for it"
    assert format_of(folder, "{# </think> #}", reasoning_parser="none").read(text, "", []) == [Content(text)]


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
    ],
)
def test_grammars_begin_after_the_reasoning(
    tokenizer_folder: Path, what: dict[str, Any], good: str, bad: str
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    inside, free = (after_reasoning(StructuredOutputs(**what), begins) for begins in (True, False))
    assert inside is not None and free is not None
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


def test_a_lark_grammar_holds_from_the_first_token() -> None:
    assert after_reasoning(StructuredOutputs(grammar="start: /a/"), True) is None


def test_forced_calls_after_reasoning(tmp_path: Path) -> None:
    form = format_of(write(byte_level(), tmp_path), "{# </think> #}")
    assert form.read('hm</think>\n{"a": 1}', "", TOOLS, True, NamedCall("f")) == [
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
    assert form.read(text, "", [], True) == [Reasoning("hm"), Content("4")]
    assert form.read('{"a": 1}', "", TOOLS, True, NamedCall("f")) == [
        ToolCallStart(0, "f"),
        Arguments(0, '{"a": 1}'),
    ]
