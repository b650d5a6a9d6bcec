"""Constraints that consist of parts, as text that `grammars` compiles: calls of tools, and answers after a
thought. A schema or a Lark grammar in them is a separate root, so that its names and options stay valid.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.core.json_schema import close_objects, drop_unknown_drafts
from jengine.core.structured_outputs import StructuredOutputs

# Without a limit, an uncertain model may generate whitespace up to max_tokens. Indentation needs fewer than
# 100 characters.
WHITESPACE = r"[ \t\n\r]{1,100}"  # the default; a schema's `x-guidance` overrides it
CALL_PARAMETERS = "parameters_"  # with a number: the rule of a tool's parameters, on a line of its own
ANSWER_JSON = "json"  # the rule of a schema
NESTED = re.compile(r"^text: %lark \{\n(.*)\n\}$", re.DOTALL | re.MULTILINE)  # the rule of a Lark grammar
TOKEN = "%token"  # before a marker that is a token, if the tokenizer has it
MARKERS = re.compile(TOKEN + r' ("(?:[^"\\]|\\.)*")')


def schema_text(schema: object) -> str:
    """A JSON schema, text or an object, as text with the default limit on whitespace, and with objects closed
    as `close_objects` does. What is no schema stays as it is.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        value = json.loads(text)
        value = {} if value is True else value
        options = value.get("x-guidance", {}) if isinstance(value, dict) else None
        if not isinstance(options, dict):
            return text
        drop_unknown_drafts(value)
        with contextlib.suppress(RecursionError):  # it stays open
            close_objects(value)
        if options.get("whitespace_flexible") is not False:
            value["x-guidance"] = {"whitespace_pattern": WHITESPACE, **options}
        return json.dumps(value)
    except (ValueError, RecursionError):
        return text  # llguidance reports the error


def object_schema(field: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of a tool's parameters, which are an object even if it does not say so.

    Raises:
        InvalidArgument: naming the field: it does not allow objects.
    """
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise InvalidArgument(field, kind, "the type of a tool's parameters must be object")
    return {**schema, "type": "object"}


def mark(text: str) -> str:
    """A marker of a model's format, as an expression of a grammar: the text or, if the tokenizer has it, the
    token, which the text does not match.
    """
    literal = json.dumps(text, ensure_ascii=False)
    return f"({literal} | {TOKEN} {literal})"


def up_to(rule: str, end: str) -> list[str]:
    """The rules of any text that ends with the first marker `end`. `rule`: the name of the rule."""
    literal, pattern = json.dumps(end, ensure_ascii=False), re.escape(end).replace("/", r"\/")
    return [
        f"{rule}: {rule}_spelled | /(?s:.*)/ {TOKEN} {literal}",
        f"{rule}_spelled[lazy]: /(?s:.*){pattern}/",
    ]


def with_tokens(grammar: str, ids: Mapping[str, int]) -> str:
    """A grammar for a tokenizer. `ids`: of its added tokens, by their texts."""

    def expression(marker: re.Match[str]) -> str:
        number = ids.get(json.loads(marker[1]))
        return marker[1] if number is None else f"<[{number}]>"

    return MARKERS.sub(expression, grammar)


def after_thought(what: StructuredOutputs, inside: bool) -> StructuredOutputs:
    """A constraint that holds after `</think>` only.

    Args:
        inside: whether the answer begins within the thought. Otherwise the model may begin it or leave it
            out.

    Raises:
        InvalidArgument: the JSON schema is no JSON.
    """
    return constrained(["answer: text", *text_rules(what)], inside)


def forced_calls(
    parameters: Mapping[str, Mapping[str, Any]], parallel: bool, inside: bool | None = None
) -> StructuredOutputs:
    """Allows only a JSON array of calls: `[{"name": "f", "parameters": {...}}]`.

    Args:
        parameters: for each tool's name, an object's JSON schema.
        parallel: whether there may be several.
        inside: see `after_thought`; None: the model does not think first.
    """
    return constrained(["answer: calls", *call_array(parameters, parallel)], inside)


def call_array(parameters: Mapping[str, Mapping[str, Any]], parallel: bool) -> list[str]:
    """The rules of `calls` that are a JSON array; see `forced_calls`."""
    more = ' (SPACE? "," SPACE? call)*' if parallel else ""
    return [f'calls: "[" SPACE? call{more} SPACE? "]"', *call_objects(parameters, "parameters")]


def call_objects(parameters: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """The rules of a `call` that is a JSON object, whose arguments have this key, and of SPACE."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(parameters)))]
    for number, name in enumerate(parameters):
        quoted = json.dumps(json.dumps(name))
        head = rf'"{{" SPACE? "\"name\"" SPACE? ":" SPACE? {quoted} SPACE? ","'
        body = rf'"\"{key}\"" SPACE? ":" SPACE? {CALL_PARAMETERS}{number} SPACE? "}}"'
        rules.append(f"call_{number}: {head} SPACE? {body}")
    return [*rules, *parameter_rules(parameters), f"SPACE: /{WHITESPACE}/"]


def parameter_rules(parameters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The rules of each tool's arguments, as JSON, named by CALL_PARAMETERS and the tool's number."""
    return [
        f"{CALL_PARAMETERS}{number}: %json {_one_line(schema_text(schema))}"
        for number, schema in enumerate(parameters.values())
    ]


def text_rules(what: StructuredOutputs) -> list[str]:
    """The rules of `text` that follows a constraint.

    Raises:
        InvalidArgument: the JSON schema is no JSON.
    """
    if what.grammar is not None:
        return [f"text: %lark {{\n{what.grammar}\n}}"]
    if what.json is not None:
        return [f"text: {ANSWER_JSON}", f"{ANSWER_JSON}: %json {_one_line(schema_text(what.json))}"]
    if what.choice is not None:
        return ["text: CHOICE", "CHOICE: " + " | ".join(json.dumps(option) for option in what.choice)]
    pattern = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", what.regex or "", flags=re.DOTALL)
    return ["text: TEXT", f"TEXT: /{pattern}/"]


def constrained(rules: Iterable[str], inside: bool | None) -> StructuredOutputs:
    """The constraint of these rules, of which `answer` is the first one.

    Args:
        inside: see `after_thought`; None: the model does not think first.
    """
    if inside is None:
        return StructuredOutputs(grammar="\n".join(["start: answer", *rules]))
    thought = "thought" if inside else f"({mark('<think>')} thought)?"
    head = [rf"start: {thought} /[\r\n]{{0,4}}/ answer", *up_to("thought", "</think>")]
    return StructuredOutputs(grammar="\n".join([*head, *rules]))


def _one_line(text: str) -> str:
    """A schema without newlines, which would begin another rule.

    Raises:
        InvalidArgument: it is no JSON.
    """
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError):
        raise InvalidArgument("structured_outputs", text, "must be valid JSON") from None
