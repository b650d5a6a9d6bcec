"""Grammars for models that reason: the constraint on the answer applies after the reasoning."""

from __future__ import annotations

import json
import re

from jengine import InvalidArgument, StructuredOutputs


def after_reasoning(what: StructuredOutputs, inside: bool) -> StructuredOutputs | None:
    """The same constraint after `</think>`; None for a Lark grammar, which applies from the first token on.

    Args:
        inside: whether the answer begins within the reasoning. Otherwise the model may begin it or leave it
            out.

    Raises:
        InvalidArgument: the JSON schema is invalid.
    """
    if what.grammar is not None:
        return None
    thought = "thought" if inside else '("<think>" thought)?'
    rules = [f"start: {thought} answer", r"thought[lazy]: /(?s:.*)<\/think>/"]
    if what.json is not None:
        rules.append(rf"answer: /[\r\n]{{0,4}}/ json{chr(10)}json: %json {json.dumps(_schema(what.json))}")
    elif what.choice is not None:
        rules += [
            r"answer: /[\r\n]{0,4}/ CHOICE",
            "CHOICE: " + " | ".join(json.dumps(option) for option in what.choice),
        ]
    else:
        pattern = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", what.regex or "", flags=re.DOTALL)
        rules += [r"answer: /[\r\n]{0,4}/ TEXT", f"TEXT: /{pattern}/"]
    return StructuredOutputs(grammar="\n".join(rules))


def _schema(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise InvalidArgument("structured_outputs", given, "must be valid JSON") from None
