"""Values of parameters that models write as plain text: JSON, with the types that a tool's schema
declares.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from jengine.serving.parsers.events import clean

STRING = frozenset({"string"})
MOST_DEPTH = 50  # of references and parts of a schema
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def parameter_types(schema: Any) -> dict[str, dict[str, Any]]:
    """The parameters that a tool's JSON schema declares, each as a schema with its types alone."""
    reader, parameters = _Types(schema), dict[str, dict[str, Any]]()
    for part in reader.parts(schema):
        properties = part.get("properties")
        for name, parameter in properties.items() if isinstance(properties, dict) else ():
            types = reader.of(parameter)
            parameters.setdefault(name, {"type": sorted(types)} if types else {})
    return parameters


def declared_types(schema: Any, root: Any = None) -> frozenset[str]:
    """The types that a JSON schema allows; empty if it does not say.

    Args:
        root: the schema to which its references belong.
    """
    return _Types(root).of(schema)


class _Types:
    """Reads the types of schemas. Each part of them is read once, since references may lead back to it.

    Args:
        root: the schema to which references belong.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}  # by the schema's identity

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a schema allows. `depth`: of references and parts that lead to it."""
        if not isinstance(schema, dict) or depth > MOST_DEPTH:
            return frozenset()
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()
            self._known[id(schema)] = self._read(schema, depth)
        return self._known[id(schema)]

    def parts(self, schema: Any) -> list[dict[str, Any]]:
        """A schema, and those of which it consists."""
        parts: dict[int, dict[str, Any]] = {}
        left = [schema]
        while left:
            part = left.pop()
            if isinstance(part, dict) and id(part) not in parts:
                parts[id(part)] = part
                several = [part.get(name) for name in ("oneOf", "anyOf", "allOf")]
                left += [inner for listed in several if isinstance(listed, list) for inner in listed]
                left.append(_target(part, self._root))
        return [*parts.values()]

    def _read(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        declared = schema.get("type")
        kinds = declared if isinstance(declared, list) else [declared]
        types = frozenset(kind for kind in kinds if isinstance(kind, str))
        for name in ("anyOf", "oneOf"):
            parts = schema.get(name)
            for part in parts if isinstance(parts, list) else ():
                types |= self.of(part, depth + 1)
        if not types:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            values = values if isinstance(values, list) else []
            types = frozenset(TYPES[type(value)] for value in values if type(value) in TYPES)
        every = schema.get("allOf")
        for part in [_target(schema, self._root), *(every if isinstance(every, list) else ())]:
            types = _both(types, self.of(part, depth + 1))
        return types


def _both(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """The types that both allow, of which one may not say."""
    if not first or not second:
        return first or second
    return frozenset(
        kind
        for kind in first | second
        if all(kind in types or (kind == "integer" and "number" in types) for types in (first, second))
    )


def _target(schema: dict[str, Any], root: Any) -> Any:
    """What the schema's `$ref` points to; None if it is not in the root."""
    place = schema.get("$ref")
    if not isinstance(place, str) or not place.startswith("#"):
        return None
    value = root
    for step in unquote(place[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value


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
