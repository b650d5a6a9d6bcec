"""Tool calls and reasoning in models' texts, whole and in arbitrary pieces."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.serving.parsers.events import (
    Arguments,
    Content,
    Event,
    OutputParser,
    PlainText,
    Reasoning,
    ThinkParser,
    ToolCallStart,
    joined,
)
from jengine.serving.parsers.harmony import Harmony
from jengine.serving.parsers.json_calls import CallArray, NamedCall
from jengine.serving.parsers.json_formats import Hermes, LlamaJson, Mistral
from jengine.serving.parsers.pythonic import Pythonic
from jengine.serving.parsers.tagged import DEEPSEEK, KIMI, MarkedCalls

NAMES = {"f", "g"}
ODD = "ns:my tool-2/x"
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "harmony": lambda: Harmony(NAMES),
    "hermes": Hermes,
    "llama3_json": lambda: LlamaJson(NAMES),
    "mistral": Mistral,
    "pythonic": lambda: Pythonic(NAMES),
    "qwen3": lambda: ThinkParser(Hermes(), inside=False),
    "deepseek_r1": lambda: ThinkParser(PlainText(), inside=True),
    "deepseek": lambda: MarkedCalls(DEEPSEEK),
    "kimi_k2": lambda: MarkedCalls(KIMI),
    "hermes names": lambda: Hermes(NAMES),
    "mistral names": lambda: Mistral(NAMES),
    "harmony odd": lambda: Harmony({ODD, "ns"}),
    "mistral odd": lambda: Mistral({ODD}),
    "deepseek odd": lambda: MarkedCalls(DEEPSEEK, {ODD}),
    "kimi odd": lambda: MarkedCalls(KIMI, {ODD, "ns"}),
    "pythonic odd": lambda: Pythonic({ODD, "ns", "h(x"}),
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
    (
        "harmony",
        "<|channel|>commentary to=functions.f json<|message|>",
        [ToolCallStart(0, "f"), Arguments(0, "{}")],
    ),
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
    # further keys, also before the name, and calls in an object of their own
    *(
        ("hermes", f"<tool_call>{call}</tool_call>", [ToolCallStart(0, "f"), Arguments(0, '{"a": [1]}')])
        for call in (
            '{"name": "f", "thought": {"name": "g"}, "arguments": {"a": [1]}, "index": 0}',
            '{"thought": "}{", "arguments": {"a": [1]}, "name": "f"}',
            '{"id": null, "function": {"description": "x", "name": "f", "arguments": {"a": [1]}}, "type": 1}',
            '{"function": "f", "arguments": {"a": [1]}}',
        )
    ),
    (
        "llama3_json",
        '{"id": "x", "name": "f", "n": 1, "parameters": {"x": 1}}; {"function": {"why": 1, "name": "g"}} so',
        [
            ToolCallStart(0, "f"),
            Arguments(0, '{"x": 1}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
            Content("so"),
        ],
    ),
    ("llama3_json", '{"answer": {"name": "f"}} x', [Content('{"answer": {"name": "f"}} x')]),
    (
        "llama3_json",
        '{"name": "f"}; {"answer": 4} x',
        [ToolCallStart(0, "f"), Arguments(0, "{}"), Content('{"answer": 4} x')],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"index": 0, "name": "f", "type": "x", "arguments": {"a": 1}}]',
        [ToolCallStart(0, "f"), Arguments(0, '{"a": 1}')],
    ),
    ("mistral", "[TOOL_CALLS] [ 1]", [Content("[TOOL_CALLS] [ 1]")]),
    # markers that are missing
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}}</tool_call>so',
        [
            *(ToolCallStart(0, "f"), Arguments(0, "{}"), ToolCallStart(1, "g"), Arguments(1, "{}")),
            Content("so"),
        ],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}} So it is.',
        [ToolCallStart(0, "f"), Arguments(0, "{}"), Content("So it is.")],
    ),
    (
        "hermes names",
        '\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}</tool_call> x',
        [
            *(ToolCallStart(0, "f"), Arguments(0, '{"a": 1}'), ToolCallStart(1, "g"), Arguments(1, "{}")),
            Content("x"),
        ],
    ),
    ("hermes names", '{"name": "f"}', [Content('{"name": "f"}')]),
    ("hermes names", '{"name": "h", "arguments": {}}', [Content('{"name": "h", "arguments": {}}')]),
    ("hermes names", 'x {"name": "f", "arguments": {}}', [Content('x {"name": "f", "arguments": {}}')]),
    (
        "mistral names",
        ' [{"name": "f", "arguments": {"a": 1}}] so',
        [ToolCallStart(0, "f"), Arguments(0, '{"a": 1}'), Content("so")],
    ),
    ("mistral names", ' [ {"name": "h", "arguments": {}}]', [Content(' [ {"name": "h", "arguments": {}}]')]),
    (
        "deepseek",
        f'{CALL}f{SEP}{{"a": 1}}{CALL}function{SEP}g\n```json\n{{}}\n```{END} so',
        [
            *(ToolCallStart(0, "f"), Arguments(0, '{"a": 1}'), ToolCallStart(1, "g"), Arguments(1, "{}")),
            Content("so"),
        ],
    ),
    ("deepseek", f"{BEGIN}{CALL}f{SEP}{{}} So.", [ToolCallStart(0, "f"), Arguments(0, "{}"), Content("So.")]),
    (
        "kimi_k2",
        f"{KIMI.begin}{KIMI.call}functions.f:0{KIMI.separator}{KIMI.call_end}{KIMI.end}",
        [ToolCallStart(0, "f"), Arguments(0, "{}")],
    ),
    # tools with unusual names, and parameters whose names are words of Python
    *(
        (form, text, [ToolCallStart(0, ODD), Arguments(0, '{"from": 1}')])
        for form, text in (
            (
                "harmony odd",
                f'<|channel|>commentary to=functions.{ODD} <|constrain|>json<|message|>{{"from": 1}}<|call|>',
            ),
            ("mistral odd", f'[TOOL_CALLS]{ODD}[ARGS]{{"from": 1}}'),
            ("deepseek odd", f'{BEGIN}{CALL}{ODD}{SEP}{{"from": 1}}{CALL_END}{END}'),
            (
                "kimi odd",
                f'{KIMI.begin}{KIMI.call}functions.{ODD}:0{KIMI.separator}{{"from": 1}}{KIMI.call_end}',
            ),
            ("pythonic odd", f"[{ODD}(from=1)]"),
        )
    ),
    (
        "pythonic",
        """[f(class='a, b=(', max-results=-1, t="x
y"), g ()]""",
        [
            ToolCallStart(0, "f"),
            Arguments(0, '{"class": "a, b=(", "max-results": -1, "t": "x\\ny"}'),
            *(ToolCallStart(1, "g"), Arguments(1, "{}")),
        ],
    ),
    ("pythonic odd", "[h(a=1)]", [Content("[h(a=1)]")]),
    ("pythonic", "[f(a=1e999)]", [Content("[f(a=1e999)]")]),
    ("pythonic", "[f(a=b)]", [Content("[f(a=b)]")]),
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
    st.sampled_from(
        ["hermes", "hermes names", "llama3_json", "mistral", "mistral names", "pythonic", "pythonic odd"]
    ),
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


@pytest.mark.parametrize(
    "name, before", [("hermes names", "\n"), ("llama3_json", ""), ("mistral names", "[")]
)
def test_an_answer_in_json_comes_before_its_end(name: str, before: str) -> None:
    parser, text = PARSERS[name](), before + '{"type": "x", "answer": "It'
    assert joined([event for piece in text for event in parser.push(piece)]) == [Content(text)]
    assert parser.push(" ra") == [Content(" ra")] and parser.push("in") == [Content("in")]


def test_long_arguments_take_linear_time() -> None:
    """Rebuilding the string for each character would take minutes."""
    text = json.dumps({"a": "x" * 2_000_000})
    assert parsed(Hermes(), f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>') == [
        ToolCallStart(0, "f"),
        Arguments(0, text),
    ]


CALL_OF_LINES = '{"text": "a\n\tb \\\n", "n": 1}'
WITH_LINES = [
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {CALL_OF_LINES}}}</tool_call>'),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{CALL_OF_LINES}"),
    (
        "kimi_k2",
        f"{KIMI.begin}{KIMI.call}functions.f:0{KIMI.separator}{CALL_OF_LINES}{KIMI.call_end}{KIMI.end}",
    ),
    ("harmony", f"<|channel|>commentary to=functions.f<|message|>{CALL_OF_LINES}<|call|>"),
]


@pytest.mark.parametrize("name, text", WITH_LINES)
def test_line_breaks_in_strings_become_json(name: str, text: str) -> None:
    assert "\n" in CALL_OF_LINES
    for pieces in ([text], [*text]):
        [start, arguments] = parsed(PARSERS[name](), *pieces)
        assert isinstance(start, ToolCallStart) and isinstance(arguments, Arguments)
        assert json.loads(arguments.text) == {"text": "a\n\tb \\\n", "n": 1}
