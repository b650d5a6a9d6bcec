"""Grammars of calls in the formats of models, for answers that are calls or follow a constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jengine.core.structured_outputs import StructuredOutputs
from jengine.text.constraints import (
    CALL_PARAMETERS,
    WHITESPACE,
    call_array,
    call_objects,
    constrained,
    mark,
    parameter_rules,
    text_rules,
    up_to,
)

Parameters = Mapping[str, Mapping[str, Any]]  # for each tool's name, an object's JSON schema
SPACE = f"SPACE: /{WHITESPACE}/"
# a literal of Python's, without its further prefixes and escapes
PYTHON = (
    "python: QUOTED | NUMBER | CONSTANT | list | dict",
    r"""QUOTED: /"([^"\\\n]|\\["'\\nrt])*"|'([^'\\\n]|\\["'\\nrt])*'/""",
    r"NUMBER: /-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?/",
    'CONSTANT: "True" | "False" | "None"',
    'list: "[" (python (", " python)*)? "]"',
    'dict: "{" (pair (", " pair)*)? "}"',
    'pair: QUOTED ": " python',
)


def calls_or_text(
    form: str, parameters: Parameters, parallel: bool, what: StructuredOutputs, inside: bool | None = None
) -> StructuredOutputs:
    """Allows calls in a model's format, or text that follows a constraint. In the format harmony, both may
    follow reasoning.

    Args:
        form: the name of a parser of calls, as in the option tool_call_parser, or plain: a JSON array.
        parameters: of the tools; empty: there are none.
        parallel: whether there may be several calls.
        inside: see `after_thought`; None: the model does not think first.

    Raises:
        InvalidArgument: the constraint's JSON schema is no JSON.
    """
    calls = "calls | " if parameters else ""
    rules = [*(CALL_RULES[form](parameters, parallel) if parameters else ()), *text_rules(what)]
    if form != "harmony":
        return constrained([f"answer: {calls}text", *rules], inside)
    final = f'final: {mark("<|channel|>")} "final" {mark("<|message|>")} text'
    return _in_channels(f"({calls}final)", [final, *rules])


def forced_in_channels(parameters: Parameters, what: StructuredOutputs | None = None) -> StructuredOutputs:
    """Allows only a call in the format harmony, which may follow reasoning.

    Args:
        parameters: of the tools.
        what: the constraint on the call's input, if there is only one tool.

    Raises:
        InvalidArgument: the constraint's JSON schema is no JSON.
    """
    if what is None:
        return _in_channels("calls", _harmony(parameters, False))
    [name] = parameters
    return _in_channels("calls", [f"calls: {_to(json.dumps(name), 'text')}", *text_rules(what)])


def _in_channels(end: str, rules: list[str]) -> StructuredOutputs:
    """Reasoning, and the rule with which the answer ends."""
    channel, message = mark("<|channel|>"), mark("<|message|>")
    head = [
        f"answer: analysis* {end} {mark('<|end|>')}?",
        f'analysis: {channel} "analysis" {message} thought {mark("<|start|>")} "assistant"',
        *up_to("thought", "<|end|>"),
    ]
    return constrained([*head, *rules], None)


def plain_calls_or_text(
    parameters: Parameters, parallel: bool, inside: bool | None = None
) -> StructuredOutputs:
    """Allows any text, but what begins as a call of a tool must be calls: a JSON array of them or a single
    one, perhaps in a code block. For models that know no format of calls.

    Args:
        inside: see `after_thought`; None: the model does not think first.
    """
    begin, key = r"\s{0,100}(```[a-z]{0,10}\s{1,100})?", r'\{\s{0,100}"name"\s{0,100}:\s{0,100}'
    names = [re.escape(json.dumps(name)).replace("/", r"\/") for name in parameters]
    more = ' (SPACE? "," SPACE? call)*' if parallel else ""
    rules = []
    # the beginning of the first call is one terminal, and TEXT excludes it, so that both can be told apart
    for i, name in enumerate(names):
        rest = rf'SPACE? "," SPACE? "\"parameters\"" SPACE? ":" SPACE? {CALL_PARAMETERS}{i} SPACE? "}}"'
        rules += [
            f'first_{i}: ARRAY_{i} {rest}{more} SPACE? "]" | ONE_{i} {rest}',
            rf"ARRAY_{i}: /{begin}\[\s{{0,100}}{key}{name}/",
            f"ONE_{i}: /{begin}{key}{name}/",
        ]
    firsts = " | ".join(f"first_{i}" for i in range(len(names)))
    return constrained(
        [
            f'answer: TEXT | ({firsts}) (SPACE? "```")? SPACE?',
            rf"TEXT: /(?s:.*)/ & ~/(?s:{begin}(\[\s{{0,100}})?{key}({'|'.join(names)}).*)/",
            *rules,
            *call_objects(parameters, "parameters"),
        ],
        inside,
    )


def _hermes(parameters: Parameters, parallel: bool) -> list[str]:
    return [
        _repeated("calls", "marked", "SPACE?", parallel),
        f"marked: {mark('<tool_call>')} SPACE? call SPACE? {mark('</tool_call>')}",
        *call_objects(parameters, "arguments"),
    ]


def _llama(parameters: Parameters, parallel: bool) -> list[str]:
    return [
        f"calls: {mark('<|python_tag|>')}? listed",
        _repeated("listed", "call", 'SPACE? ";" SPACE?', parallel),
        *call_objects(parameters, "parameters"),
    ]


def _mistral(parameters: Parameters, parallel: bool) -> list[str]:
    """Arrays of calls, and the form of newer models: the tool's name and its arguments."""
    number = rf"({mark('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?"
    return [
        f'calls: {mark("[TOOL_CALLS]")} SPACE? "[" SPACE? listed SPACE? "]" | named',
        _repeated("listed", "call", 'SPACE? "," SPACE?', parallel),
        *call_objects(parameters, "arguments"),
        _repeated("named", "each", "", parallel),
        *_each(parameters, lambda name, i: f"{name} {number} {mark('[ARGS]')}? {CALL_PARAMETERS}{i}"),
        f"begin: {mark('[TOOL_CALLS]')}",
    ]


def _deepseek(parameters: Parameters, parallel: bool) -> list[str]:
    """Calls of V3 and R1, with the arguments in a code block, and of V3.1."""
    begin, end, call, call_end, separator = (
        mark(f"<\uff5ctool▁{name}\uff5c>")
        for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    )

    def body(name: str, i: int) -> str:
        block = rf'"function" {separator} {name} "\n```json\n" {CALL_PARAMETERS}{i} "\n```"'
        return f"({block} | {name} {separator} {CALL_PARAMETERS}{i}) {call_end}"

    return [
        f"calls: {begin} SPACE? listed SPACE? {end}",
        _repeated("listed", "each", "SPACE?", parallel),
        *_each(parameters, body),
        *parameter_rules(parameters),
        f"begin: {call}",
        SPACE,
    ]


def _kimi(parameters: Parameters, parallel: bool) -> list[str]:
    def body(name: str, i: int) -> str:
        argument = mark("<|tool_call_argument_begin|>")
        end = mark("<|tool_call_end|>")
        return f'"functions." {name} /:[0-9]{{1,4}}/ {argument} {CALL_PARAMETERS}{i} {end}'

    return [
        f"calls: {mark('<|tool_calls_section_begin|>')} listed {mark('<|tool_calls_section_end|>')}",
        _repeated("listed", "each", "", parallel),
        *_each(parameters, body),
        *parameter_rules(parameters),
        f"begin: {mark('<|tool_call_begin|>')}",
    ]


def _harmony(parameters: Parameters, parallel: bool) -> list[str]:
    """One call, after which the model waits for its result."""
    each = _each(parameters, lambda name, i: _to(name, f"{CALL_PARAMETERS}{i}"))
    return ["calls: each", *each, *parameter_rules(parameters), "begin:"]


def _to(name: str, text: str) -> str:
    """A message of harmony to a function. `name`, `text`: expressions of its name and its input."""
    to, channel = f'" to=functions." {name}', f'{mark("<|channel|>")} ("commentary" | "analysis")'
    json_type = f'(" "? {mark("<|constrain|>")} "json" | " json")? {mark("<|message|>")}'
    return f"({to} {channel} | {channel} {to}) {json_type} {text} {mark('<|call|>')}?"


def _pythonic(parameters: Parameters, parallel: bool) -> list[str]:
    def body(name: str, i: int) -> str:
        pair = f'KEY_{i} "=" python'
        return f'{name} "(" ({pair} ("," SPACE? {pair})*)? ")"'

    return [
        f'calls: {mark("<|python_start|>")}? "[" listed "]" {mark("<|python_end|>")}?',
        _repeated("listed", "each", '"," SPACE?', parallel),
        *_each(parameters, body),
        *_keys(parameters),
        *PYTHON,
        "begin:",
        SPACE,
    ]


def _tagged(
    section: str, call: str, name_end: str, key: str, key_end: str, value: str, value_end: str, call_end: str
) -> Callable[[Parameters, bool], list[str]]:
    """Calls whose parameters are tags. `section`: the tag around all calls, or around each, without brackets;
    empty: none. `value`: the tag before a value.
    """

    def rules(parameters: Parameters, parallel: bool) -> list[str]:
        def body(name: str, i: int) -> str:
            before = f"SPACE? {mark(value)}" if value else ""
            pair = f"SPACE? {mark(key)} KEY_{i} {mark(key_end)} {before} value"
            return f"{name} {mark(name_end) if name_end else ''} ({pair})* SPACE? {mark(call_end)}"

        around = (
            f"{mark(f'<{section}>')} SPACE? listed SPACE? {mark(f'</{section}>')}" if section else "listed"
        )
        return [
            _repeated("calls", "around", "SPACE?", parallel),
            f"around: {around}",
            _repeated("listed", "each", "SPACE?", parallel and section != ""),
            *_each(parameters, body),
            *_keys(parameters),
            *up_to("value", value_end),
            f"begin: {mark(call)}",
            SPACE,
        ]

    return rules


CALL_RULES: dict[str, Callable[[Parameters, bool], list[str]]] = {
    "plain": call_array,
    "deepseek": _deepseek,
    "glm45": _tagged(
        "", "<tool_call>", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"
    ),
    "harmony": _harmony,
    "hermes": _hermes,
    "kimi_k2": _kimi,
    "llama3_json": _llama,
    "minimax_m2": _tagged(
        *("minimax:tool_call", '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>"),
        "</invoke>",
    ),
    "mistral": _mistral,
    "pythonic": _pythonic,
    "qwen3_coder": _tagged(
        "tool_call", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>"
    ),
}


def _repeated(rule: str, part: str, between: str, parallel: bool) -> str:
    return f"{rule}: {part} ({between} {part})*" if parallel else f"{rule}: {part}"


def _each(parameters: Parameters, body: Callable[[str, int], str]) -> list[str]:
    """The rules of `each`, a call of any tool after `begin`. `body`: a tool's call, from its name, an
    expression, and its number.
    """
    names = [json.dumps(name, ensure_ascii=False) for name in parameters]
    return [
        "each: " + " | ".join(f"begin each_{i}" for i in range(len(names))),
        *(f"each_{i}: {body(name, i)}" for i, name in enumerate(names)),
    ]


def _keys(parameters: Parameters) -> list[str]:
    """Rules for each tool's parameters: their names, or any if the schema has no list of them."""
    rules = []
    for i, schema in enumerate(parameters.values()):
        properties = schema.get("properties")
        names = [json.dumps(name, ensure_ascii=False) for name in properties or ()]
        rules.append(f"KEY_{i}: " + (" | ".join(names) or r"/[^<>()=\"',\s]{1,100}/"))
    return rules
