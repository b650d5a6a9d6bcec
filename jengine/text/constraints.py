"""Constraints that consist of parts, as text that `grammars` compiles: calls of tools, and answers after a
thought. A schema in them is a root of its own, so that its references and options stay valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.core.structured_outputs import StructuredOutputs

# Without a limit, an uncertain model may generate whitespace up to max_tokens. Indentation needs fewer than
# 100 characters.
WHITESPACE = r"[ \t\n\r]{1,100}"  # the default; a schema's `x-guidance` overrides it
CALL_PARAMETERS = "parameters_"  # with a number: the rule of a tool's parameters, on a line of its own
ANSWER_JSON = "json"  # the rule of a schema


def schema_text(schema: object) -> str:
    """A JSON schema, text or an object, as text with the default limit on whitespace. What is no schema stays
    as it is.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text  # llguidance reports the error
    value = {} if value is True else value
    options = value.get("x-guidance", {}) if isinstance(value, dict) else None
    if not isinstance(options, dict):
        return text
    if options.get("whitespace_flexible") is False or "whitespace_pattern" in options:
        return text
    return json.dumps({**value, "x-guidance": {**options, "whitespace_pattern": WHITESPACE}})


def object_schema(field: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of a tool's parameters, which are an object even if it does not say so.

    Raises:
        InvalidArgument: naming the field: it does not allow objects.
    """
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise InvalidArgument(field, kind, "the type of a tool's parameters must be object")
    return {**schema, "type": "object"}


def after_thought(what: StructuredOutputs, inside: bool) -> StructuredOutputs:
    """The same constraint after `</think>`. It must not be a Lark grammar, which cannot be moved.

    Args:
        inside: whether the answer begins within the thought. Otherwise the model may begin it or leave it
            out.

    Raises:
        InvalidArgument: the JSON schema is no JSON.
    """
    if what.json is not None:
        rules = [f"answer: {ANSWER_JSON}", f"{ANSWER_JSON}: %json {_one_line(schema_text(what.json))}"]
    elif what.choice is not None:
        rules = ["answer: CHOICE", "CHOICE: " + " | ".join(json.dumps(option) for option in what.choice)]
    else:
        pattern = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", what.regex or "", flags=re.DOTALL)
        rules = ["answer: TEXT", f"TEXT: /{pattern}/"]
    return _grammar(rules, inside)


def forced_calls(
    parameters: Mapping[str, Mapping[str, Any]], parallel: bool, inside: bool | None = None
) -> StructuredOutputs:
    """Allows only a JSON array of calls: `[{"name": "f", "parameters": {...}}]`.

    Args:
        parameters: for each tool's name, an object's JSON schema.
        parallel: whether there may be several.
        inside: see `after_thought`; None: the model does not think first.
    """
    more = ' (SPACE? "," SPACE? call)*' if parallel else ""
    rules = [
        f'answer: "[" SPACE? call{more} SPACE? "]"',
        f"SPACE: /{WHITESPACE}/",
        "call: " + " | ".join(f"call_{number}" for number in range(len(parameters))),
    ]
    for number, name in enumerate(parameters):
        quoted = json.dumps(json.dumps(name))
        head = rf'"{{" SPACE? "\"name\"" SPACE? ":" SPACE? {quoted} SPACE? ","'
        body = rf'"\"parameters\"" SPACE? ":" SPACE? {CALL_PARAMETERS}{number} SPACE? "}}"'
        rules.append(f"call_{number}: {head} SPACE? {body}")
    for number, schema in enumerate(parameters.values()):
        rules.append(f"{CALL_PARAMETERS}{number}: %json {_one_line(schema_text(schema))}")
    return _grammar(rules, inside)


def _grammar(rules: list[str], inside: bool | None) -> StructuredOutputs:
    if inside is None:
        head = ["start: answer"]
    else:
        thought = "thought" if inside else '("<think>" thought)?'
        head = [rf"start: {thought} /[\r\n]{{0,4}}/ answer", r"thought[lazy]: /(?s:.*)<\/think>/"]
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
