"""Tool calls whose parameters are tags, whole and in arbitrary pieces, and the JSON values that they
become.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jengine.serving.parsers.events import (
    Arguments,
    Content,
    Event,
    OutputParser,
    Reasoning,
    ThinkParser,
    ToolCallStart,
)
from jengine.serving.parsers.json_calls import argument, parameter_types
from jengine.serving.parsers.tagged import GLM, MINIMAX, QWEN_CODER, TaggedCalls
from tests.serving.test_formats import TOOLS, format_of
from tests.serving.test_parsers import cut, parsed
from tests.text.conftest import byte_level, write

SCHEMAS = {
    "f": {
        "s": frozenset({"string"}),
        "n": frozenset({"integer"}),
        "o": frozenset({"object"}),
        "m": frozenset({"string", "null"}),
    },
    "g": {},
    "my tool": {},
}
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "glm45": lambda: TaggedCalls(GLM, SCHEMAS),
    "glm45 thinking": lambda: ThinkParser(TaggedCalls(GLM, SCHEMAS), inside=False),
    "minimax_m2": lambda: TaggedCalls(MINIMAX, SCHEMAS),
    "minimax_m2 thinking": lambda: ThinkParser(TaggedCalls(MINIMAX, SCHEMAS), inside=True),
    "qwen3_coder": lambda: TaggedCalls(QWEN_CODER, SCHEMAS),
}
CASES: list[tuple[str, str, list[Event]]] = [
    (
        "glm45",
        (
            "Well\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a"
            ' "b"\n</arg></arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n'
            "</tool_call>\n<tool_call>g\n</tool_call> so"
        ),
        [
            *(
                Content("Well"),
                ToolCallStart(0, "f"),
                Arguments(0, '{"s": "a \\"b\\"\\n</arg>", "n": 3}'),
                ToolCallStart(1, "g"),
                Arguments(1, "{}"),
            ),
            Content("so"),
        ],
    ),
    (
        "glm45",  # 4.7's, without newlines
        (
            '<tool_call>f<arg_key>o</arg_key><arg_value>{"a": [true, null]}</arg_value>'
            "<arg_key>s</arg_key><arg_value>5</arg_value></tool_call>"
        ),
        [ToolCallStart(0, "f"), Arguments(0, '{"o": {"a": [true, null]}, "s": "5"}')],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>s</arg_key><arg_value>ab",
        [ToolCallStart(0, "f"), Arguments(0, '{"s": "ab')],
    ),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>1", [ToolCallStart(0, "f")]),
    (
        "glm45",
        "<tool_call>f<arg_key>n</arg_key> or <tool_call>g</tool_call>",
        [ToolCallStart(0, "f"), Arguments(0, "{}"), ToolCallStart(1, "g"), Arguments(1, "{}")],
    ),
    ("glm45", "a <tool_call>f</b> c", [Content("a <tool_call>f</b> c")]),
    (
        "glm45",
        'a <tool_call>\n{"name": "f"}</tool_call>',
        [Content('a <tool_call>\n{"name": "f"}</tool_call>')],
    ),
    ("glm45", "a <tool_call></tool_call>", [Content("a <tool_call></tool_call>")]),
    ("glm45", "a <tool_call>f<arg", [Content("a <tool_call>f<arg")]),
    (
        "glm45 thinking",
        "\n<think>hm</think>\n<tool_call>g\n<arg_key>k</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>",
        [Reasoning("hm"), ToolCallStart(0, "g"), Arguments(0, '{"k": "x y"}')],
    ),
    (
        "minimax_m2",
        (
            'Well\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="o">{"a":'
            ' "</x>"}</parameter>\n<parameter name="s">1\n</parameter>\n</invoke>\n<invoke'
            ' name="g">\n</invoke>\n</minimax:tool_call>'
        ),
        [
            Content("Well"),
            ToolCallStart(0, "f"),
            Arguments(0, '{"o": {"a": "</x>"}, "s": "1\\n"}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    (
        "minimax_m2",  # the end of the first call is missing
        (
            '<minimax:tool_call><invoke name="f"><parameter name="n">1</parameter><invoke'
            ' name="g"></minimax:tool_call>so'
        ),
        [
            ToolCallStart(0, "f"),
            Arguments(0, '{"n": 1}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
            Content("so"),
        ],
    ),
    ("minimax_m2", 'a <minimax:tool_call> <invoke name="f">', [Content("a"), ToolCallStart(0, "f")]),
    ("minimax_m2", "a <minimax:tool_call> b", [Content("a <minimax:tool_call> b")]),
    (
        "minimax_m2",
        'a <minimax:tool_call><invoke name="f g">',
        [Content('a <minimax:tool_call><invoke name="f g">')],
    ),
    (
        "minimax_m2",
        "a <minimax:tool_call>\n</minimax:tool_call>",
        [Content("a <minimax:tool_call>\n</minimax:tool_call>")],
    ),
    (
        "minimax_m2 thinking",
        'hm\n</think>\n\n<minimax:tool_call><invoke name="g"></invoke>',
        [Reasoning("hm"), ToolCallStart(0, "g"), Arguments(0, "{}")],
    ),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=f>\n<parameter=s>\nline\n\nline\n</parameter>\n<parameter=n>\n7\n</parameter>\n<parameter=m>\n7\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
        ),
        [
            ToolCallStart(0, "f"),
            Arguments(0, '{"s": "line\\n\\nline", "n": 7, "m": "7"}'),
            ToolCallStart(1, "g"),
            Arguments(1, "{}"),
        ],
    ),
    # closing tags in values, which end where another tag follows
    (
        "qwen3_coder",
        (
            "<tool_call><function=f><parameter=s>\n</parameter> x</function>\n <parameter=s>\n</parameter></"
            '\n</parameter>\n<parameter=o>\n["</parameter>"]\n</parameter>\n</function>\n</tool_call>'
        ),
        [
            ToolCallStart(0, "f"),
            Arguments(
                0,
                '{"s": "</parameter> x</function>\\n <parameter=s>\\n</parameter></", "o": ["</parameter>"]}',
            ),
        ],
    ),
    (
        "glm45",
        (
            "<tool_call>f<arg_key>s</arg_key><arg_value></arg_value> x</tool_call> y</arg_value>\n"
            "<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"
        ),
        [ToolCallStart(0, "f"), Arguments(0, '{"s": "</arg_value> x</tool_call> y", "n": 1}')],
    ),
    (
        "minimax_m2",
        '<invoke name="f"><parameter name="s"></parameter>x</invoke> y</parameter></invoke>',
        [ToolCallStart(0, "f"), Arguments(0, '{"s": "</parameter>x</invoke> y"}')],
    ),
    # tags that are missing: the section's, a value's end, a call's end
    (
        "qwen3_coder",
        "So: <function=f>\n<parameter=s>\nx\n<parameter=n>\n1\n</function>\n</tool_call>\nDone.",
        [Content("So:"), ToolCallStart(0, "f"), Arguments(0, '{"s": "x", "n": 1}'), Content("Done.")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=n>\n1\n</parameter></tool_call><tool_call><function=g></function>",
        [ToolCallStart(0, "f"), Arguments(0, '{"n": 1}'), ToolCallStart(1, "g"), Arguments(1, "{}")],
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=s>\nx</function>",
        [ToolCallStart(0, "f"), Arguments(0, '{"s": "x"}')],
    ),
    ("qwen3_coder", "Use <function=h> here.", [Content("Use <function=h> here.")]),
    ("minimax_m2", '<invoke name="g"></invoke>', [ToolCallStart(0, "g"), Arguments(0, "{}")]),
    ("glm45", "<tool_call>my tool\n</tool_call>", [ToolCallStart(0, "my tool"), Arguments(0, "{}")]),
    ("qwen3_coder", "<function=my tool></function>", [ToolCallStart(0, "my tool"), Arguments(0, "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>\n\n</parameter>",
        [ToolCallStart(0, "f"), Arguments(0, '{"s": ""')],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        [Content('<tool_call>\n{"name": "f"}\n</tool_call>')],
    ),
]


@pytest.mark.parametrize("name, text, events", CASES)
def test_whole(name: str, text: str, events: list[Event]) -> None:
    assert parsed(PARSERS[name](), text) == events
    assert parsed(PARSERS[name](), *text) == events, "character by character"


TAGS = {
    tag
    for tags in (GLM, MINIMAX, QWEN_CODER)
    for tag in dataclasses.astuple(tags)
    if isinstance(tag, str) and tag
}
FRAGMENTS = st.sampled_from(
    [*sorted(TAGS), *sorted(TAGS), *"fgsno", "<", ">", '"', " ", "\n", "{", "1", "<think>", "</think>"]
)
TEXTS = st.lists(FRAGMENTS, max_size=16).map("".join)


@given(st.sampled_from(sorted(PARSERS)), TEXTS, st.lists(st.integers(0, 150), max_size=12))
def test_cuts_change_nothing(name: str, text: str, places: list[int]) -> None:
    assert parsed(PARSERS[name](), *cut(text, places)) == parsed(PARSERS[name](), text)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 250), max_size=12))
def test_cuts_of_what_models_write_change_nothing(
    case: tuple[str, str, list[Event]], places: list[int]
) -> None:
    name, text, events = case
    assert parsed(PARSERS[name](), *cut(text, places)) == events


@given(st.sampled_from([name for name in PARSERS if "thinking" not in name]), TEXTS)
def test_no_text_is_lost_where_there_is_no_call(name: str, text: str) -> None:
    events = parsed(PARSERS[name](), text)
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert events == ([Content(text)] if text else [])


def test_many_tags_in_a_value_take_linear_time() -> None:
    """Copying the rest of the text for each tag would take minutes."""
    value = "</parameter>x\n<parameter=s>" * 100_000
    text = f"<tool_call><function=f><parameter=s>\n{value}\n</parameter></function></tool_call>"
    _, arguments = parsed(TaggedCalls(QWEN_CODER, SCHEMAS), text)
    assert isinstance(arguments, Arguments) and arguments.text == json.dumps({"s": value})


def test_strings_come_before_their_end() -> None:
    parser = TaggedCalls(GLM, SCHEMAS)
    assert parser.push("<tool_call>f<arg_key>s</arg_key><arg_value>a\tb</") == [
        ToolCallStart(0, "f"),
        Arguments(0, '{"s": "a\\tb'),
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["s", "n", "o", "m", "x"]), st.text('ab<>/"\\\n5e{}[]:, nulltrue', max_size=12)
        ),
        max_size=4,
    )
)
def test_what_tags_become_is_json(parameters: list[tuple[str, str]]) -> None:
    """Whatever a value's text, arguments are JSON, and strings are the text."""
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in parameters)
    _, *rest = parsed(
        TaggedCalls(QWEN_CODER, SCHEMAS), f"<tool_call><function=f>{text}</function></tool_call>"
    )
    [arguments] = [event for event in rest if isinstance(event, Arguments)]
    found = json.loads(arguments.text, object_pairs_hook=list)
    assert [key for key, _ in found] == [key for key, _ in parameters]
    assert all(got == value for (key, got), (_, value) in zip(found, parameters, strict=True) if key == "s")


PIECES = st.lists(st.sampled_from(["x", "\n", " ", '"', "<", *sorted(TAGS)]), max_size=8).map("".join)


@given(
    st.sampled_from(["glm45", "minimax_m2", "qwen3_coder"]), PIECES, st.lists(st.integers(0, 200), max_size=8)
)
def test_values_may_have_tags(name: str, value: str, places: list[int]) -> None:
    """A value is what stands between its tags, unless a closing tag in it is followed by another tag."""
    tags, before, call = {
        "glm45": (GLM, "<tool_call>f<arg_key>s</arg_key><arg_value>", ""),
        "minimax_m2": (
            MINIMAX,
            '<minimax:tool_call><invoke name="f"><parameter name="s">',
            "</minimax:tool_call>",
        ),
        "qwen3_coder": (QWEN_CODER, "<tool_call><function=f><parameter=s>\n", "</tool_call>"),
    }[name]
    end = "\n" if tags.newlines else ""
    following = "|".join(
        re.escape(tag) for tag in (tags.key, tags.call_end, tags.section_end, tags.call) if tag
    )
    closing = f"(?:{re.escape(tags.value_end)}|{re.escape(tags.call_end)})"
    new_key = f"{re.escape(tags.key)}\\s*[nom]"
    # also a tag that the value's end makes the next one of a closing tag
    assume(
        re.search(rf"{closing}\s*(?:{following}|$|{re.escape(tags.value_end)})|{new_key}", value + end)
        is None
    )
    text = f"{before}{value}{end}{tags.value_end}{tags.call_end}{call}"
    assert parsed(PARSERS[name](), *cut(text, places)) == [
        ToolCallStart(0, "f"),
        Arguments(0, json.dumps({"s": value})),
    ]


def test_types_of_values() -> None:
    every = {"type": ["integer", "null"], "anyOf": [{"type": "string"}, {"enum": [True, 1.5]}, 3]}
    parameters = {"e": every, "s": {"enum": ["a", "b"]}, "no": True, "none": {"$ref": "https://example.com/"}}
    assert parameter_types({"properties": parameters}) == {
        "e": {"integer", "null", "string", "boolean", "number"},
        "s": {"string"},
        "no": set(),
        "none": set(),
    }
    text = {"type": "string"}
    for schema, types in (
        ({"const": "1"}, {"string"}),
        ({"$ref": "#/$defs/A~1B%20"}, {"string"}),
        ({"$ref": "#/$defs/Chain"}, {"string"}),
        ({"$ref": "#/$defs/Several/anyOf/1"}, {"null"}),
        ({"allOf": [{"$ref": "#/$defs/Chain"}, {"minLength": 1}]}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/Chain"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/Several", "type": "string"}, {"string"}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, {"integer"}),
        ({"$ref": "#/$defs/Endless"}, set()),
        ({"$ref": "#/$defs/None/x/0"}, set()),
        ({"$ref": "https://example.com/schema"}, set()),
    ):
        defs = {
            "A/B ": text,
            "Chain": {"allOf": [{"$ref": "#/$defs/A~1B%20"}]},
            "Several": {"anyOf": [text, {"type": "null"}]},
            "Endless": {"$ref": "#/$defs/Endless", "anyOf": [{"$ref": "#/$defs/Endless"}] * 2},
        }
        root = {"allOf": [{"$ref": "#/$defs/Args"}], "$defs": {**defs, "Args": {"properties": {"p": schema}}}}
        assert parameter_types(root) == {"p": types}, schema
    many = [{"$ref": "#/$defs/A"}] * 1000  # 1000 paths at each step
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": many, "allOf": many, "properties": {"p": text}}}}
    assert parameter_types(loop) == {"p": {"string"}}
    assert parameter_types({**loop, "properties": {"q": loop}}) == {"p": {"string"}, "q": set()}
    assert parameter_types(None) == parameter_types({"properties": 3}) == parameter_types({"$ref": "#"}) == {}
    for text, types, expected in (
        ("5", {"number"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("null", {"string", "null"}, "null"),
        ("yes", {"boolean"}, '"yes"'),
        (" True\n", {"boolean"}, "true"),  # as templates show Python's values
        ("FALSE", {"boolean", "null"}, "false"),
        ("None", {"integer", "null"}, "null"),
        ("True", {"boolean", "string"}, '"True"'),
        ("True", {"integer"}, '"True"'),
        ("[1]", {"object"}, "[1]"),
        ("NaN", {"number"}, '"NaN"'),
        ("1e999", {"number"}, '"1e999"'),
        ("[" * 100_000, set(), json.dumps("[" * 100_000)),
    ):
        assert argument(text, frozenset(types)) == expected


def test_values_have_the_types_of_the_tools_schema(tmp_path: Path) -> None:
    form = format_of(
        write(byte_level(), tmp_path), "{# <arg_key> </think> #}{{ enable_thinking }}{{ tools }}"
    )
    text = "<think>hm</think>\n<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
    untyped = [
        {"type": "function", "function": {"name": "f", "parameters": None}},
        {"type": "function", "function": {"name": "g"}},
    ]
    string = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"n": {"type": "string"}}}},
        }
    ]
    for tools, value in ((TOOLS, "3"), (untyped, "3"), (string, '"3"')):
        assert parsed(form.parser("<|assistant|>", tools), text) == [
            Reasoning("hm"),
            ToolCallStart(0, "f"),
            Arguments(0, f'{{"n": {value}}}'),
        ]
    assert parsed(form.parser("<|assistant|>\n<think></think>", TOOLS), "so") == [Content("so")], (
        "thinking is off"
    )
