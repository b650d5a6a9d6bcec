"""Values of parameters that models write as plain text: JSON, with the types that a tool's schema
declares.
"""

from __future__ import annotations

import json
from typing import Any

from jengine.serving.parsers.events import clean

STRING = frozenset({"string"})
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def declared_types(schema: Any) -> frozenset[str]:
    """The types that a JSON schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    given = schema.get("type")
    found = (
        {given}
        if isinstance(given, str)
        else {kind for kind in given if isinstance(kind, str)}
        if isinstance(given, list)
        else set()
    )
    for several in ("anyOf", "oneOf"):
        parts = schema.get(several)
        found = found.union(*(declared_types(part) for part in parts)) if isinstance(parts, list) else found
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found = {TYPES[type(value)] for value in values if type(value) in TYPES}
    return frozenset(found)


def argument(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value. Text that is not JSON of one of the types is a string, if a string is allowed
    or it is not JSON.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        kind = TYPES[type(value)]
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        if fits or "string" not in types:
            return clean(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        pass
    return f'"{quoted(text)}"'


def quoted(text: str) -> str:
    """Text within a JSON string, without the quotes. A longer text's is that of its pieces."""
    return clean(json.dumps(text, ensure_ascii=False)[1:-1])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
