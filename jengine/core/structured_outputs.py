"""Constraints on the output."""

from __future__ import annotations

import json
from dataclasses import InitVar, dataclass
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.core.json_schema import open_objects
from jengine.vllm.translate import STRUCTURED_SETTINGS, takes

PLACE = "structured_outputs"


@takes(STRUCTURED_SETTINGS, "field")
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output: exactly one of a JSON schema, a regular expression, a choice of texts and a
    grammar.

    Args:
        json: a schema as text or as a dict, or a class with `model_json_schema`, such as a pydantic model,
            which is stored as a dict. An object that lists `properties` has no others, unless its schema
            says so (`"additionalProperties": true`). The output has at most 100 whitespace characters in a
            row, unless the schema's `x-guidance` (llguidance's options) sets `whitespace_pattern`.
        regex, choice: the whole output matches the expression, or is one of the texts.
        grammar: in Lark's notation, or in GBNF, which is llama.cpp's and vLLM's (`root ::= "a" | "b"`).
        disable_any_whitespace: allow no whitespace between the parts of JSON (in the schema's `x-guidance`).
        whitespace_pattern: a regular expression of the whitespace that is allowed between the parts of JSON.
        disable_additional_properties: False lets objects have properties beside those that the schema lists,
            as JSON Schema says. The schema becomes a dict that says so.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: InitVar[bool] = False
    whitespace_pattern: InitVar[str | None] = None
    disable_additional_properties: InitVar[bool] = True

    def __post_init__(
        self,
        disable_any_whitespace: bool,
        whitespace_pattern: str | None,
        disable_additional_properties: bool,
    ) -> None:
        fields = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(fields) != 1:
            raise InvalidArgument(
                "structured_outputs", fields, "exactly one of json, regex, choice and grammar must be given"
            )
        value = getattr(self, fields[0])
        if fields[0] == "json" and isinstance(value, type) and hasattr(value, "model_json_schema"):
            value = value.model_json_schema()
            object.__setattr__(self, "json", value)
        kinds = {"json": (str, dict), "choice": (list, tuple)}.get(fields[0], (str,))
        if not isinstance(value, kinds) or (
            fields[0] == "choice" and not (value and all(isinstance(x, str) and x for x in value))
        ):
            wanted = {
                "json": "a schema: text, a dict or a pydantic model class",
                "choice": "a list of texts",
            }.get(fields[0], "text")
            raise InvalidArgument(f"structured_outputs.{fields[0]}", value, f"must be {wanted}")
        if disable_any_whitespace is not False or whitespace_pattern is not None:
            schema = _with_whitespace(self.json, disable_any_whitespace, whitespace_pattern)
            object.__setattr__(self, "json", schema)
        if disable_additional_properties is not True:
            object.__setattr__(self, "json", _opened(self.json, disable_additional_properties))


def structured(fields: dict[str, Any]) -> StructuredOutputs:
    try:
        return StructuredOutputs(**fields)
    except InvalidArgument as wrong:
        field = (
            wrong.field
            if wrong.field.startswith("structured_outputs")
            else f"structured_outputs.{wrong.field}"
        )
        raise InvalidArgument(field, wrong.value, wrong.limit) from None


def _with_whitespace(schema: object, disabled: object, pattern: object) -> dict[str, Any]:
    """The schema with these options in its `x-guidance`, where llguidance reads them.

    Args:
        schema: text or a dict; None: the output is no JSON.
        disabled: allow none.
        pattern: a regular expression; None: the default.

    Raises:
        InvalidArgument: naming the option and its limit.
    """
    name, value = (
        ("whitespace_pattern", pattern) if pattern is not None else ("disable_any_whitespace", disabled)
    )
    if schema is None:
        raise InvalidArgument(f"{PLACE}.{name}", value, "only with json")
    if not isinstance(disabled, bool):
        raise InvalidArgument(f"{PLACE}.disable_any_whitespace", disabled, "must be true or false")
    if pattern is not None and not isinstance(pattern, str):
        raise InvalidArgument(f"{PLACE}.whitespace_pattern", pattern, "must be a regular expression")
    if disabled and pattern is not None:
        raise InvalidArgument(f"{PLACE}.whitespace_pattern", pattern, "not with disable_any_whitespace")
    schema = _parsed(schema)
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(options, dict):
        raise InvalidArgument(f"{PLACE}.json", schema, f"must be an object, with {name}")
    chosen = {"whitespace_flexible": False} if disabled else {"whitespace_pattern": pattern}
    return {**schema, "x-guidance": {**options, **chosen}}


def _opened(schema: object, disabled: object) -> Any:
    """The schema with objects that may have any properties.

    Args:
        schema: as for `_with_whitespace`.
        disabled: the option, which must be False.

    Raises:
        InvalidArgument: naming the option and its limit.
    """
    name = f"{PLACE}.disable_additional_properties"
    if disabled is not False or schema is None:
        raise InvalidArgument(
            name, disabled, "must be true or false" if disabled is not False else "only with json"
        )
    opened = _parsed(schema)
    open_objects(opened)
    return opened


def _parsed(schema: object) -> object:
    """A copy of a schema, which may be text.

    Raises:
        InvalidArgument: it is no JSON.
    """
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as wrong:
        raise InvalidArgument(f"{PLACE}.json", schema, f"must be valid JSON: {wrong}") from None
