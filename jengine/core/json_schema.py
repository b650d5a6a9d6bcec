"""Objects in JSON schemas: which properties they may have beside those that the schema lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")  # say what else there may be
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
DATA = ("const", "default", "enum", "examples", "required", "x-guidance")  # hold no schemas
DRAFT = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
MAX_NAMES = 20_000  # to look at in schemas that apply to the same objects, a few milliseconds

Schema = dict[str, Any]


class Listed(NamedTuple):
    """What a schema says of an object, together with the schemas that apply to the same object.

    Attributes:
        names: of the properties that it lists, in their order.
        required: the names that it requires.
        decides: whether it says what else there may be, or refers to a schema elsewhere.
    """

    names: dict[str, Any]
    required: set[str]
    decides: bool


def close_objects(root: Any) -> None:
    """Forbids further properties, in place, in every object that lists `properties` and says nothing of
    others. Small models otherwise add properties until max_tokens.

    Where several schemas apply to an object (allOf, or a $ref beside properties), each alone would forbid the
    properties of the others. There, all together are closed. An object that requires a name which is not
    listed stays open.

    Raises:
        RecursionError: schemas that apply to the same object are nested hundreds deep, or list more than
            MAX_NAMES. The schema is unchanged.
    """
    looks = 0
    known: dict[int, Listed] = {}
    parts: set[int] = set()  # ids of schemas that are closed by another one, if at all

    def listed(schema: Schema) -> Listed:
        nonlocal looks
        if id(schema) not in known:
            properties, required = schema.get("properties"), schema.get("required")
            names = dict.fromkeys(properties, True) if isinstance(properties, dict) else {}
            needed = (
                {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            )
            decides = any(key in schema for key in OTHERS)
            known[id(schema)] = Listed({}, set(), False)  # for one that contains itself
            for part in chain(*_applied(schema, root)):
                of_part = Listed({}, set(), True) if part is None else listed(part)
                if (looks := looks + len(of_part.names) + len(of_part.required)) > MAX_NAMES:
                    raise RecursionError
                names |= of_part.names
                needed |= of_part.required
                decides |= of_part.decides
            known[id(schema)] = Listed(names, needed, decides)
        return known[id(schema)]

    def leave_to_another(schema: Schema) -> None:
        for part in chain(*_applied(schema, root)):
            if part is not None and id(part) not in parts:
                parts.add(id(part))
                leave_to_another(part)

    closed = []
    for schema in _schemas(root):
        lists = isinstance(schema.get("properties"), dict)
        sources = lists + sum(
            any(part is not None and listed(part).names for part in group) for group in _applied(schema, root)
        )
        if sources > 1:
            leave_to_another(schema)
        if lists or sources > 1:
            closed.append(schema)
    for schema in closed:
        names, needed, decides = listed(schema)
        if id(schema) not in parts and not decides and names.keys() >= needed:
            schema |= {"properties": names | schema.get("properties", {}), "additionalProperties": False}


def open_objects(root: Any) -> None:
    """Writes into every object that `close_objects` would close, in place, that it has any others."""
    for schema in _schemas(root):
        if isinstance(schema.get("properties"), dict) and not any(key in schema for key in OTHERS):
            schema["additionalProperties"] = True


def drop_patterns(root: Any) -> None:
    """Removes every `pattern`, in place."""
    for schema in _schemas(root):
        schema.pop("pattern", None)


def drop_unknown_drafts(root: Any) -> None:
    """Removes each `$schema` that names no draft of JSON Schema, in place; llguidance would refuse it."""
    for schema in _schemas(root):
        if DRAFT.fullmatch(str(schema.get("$schema", ""))) is None:
            schema.pop("$schema", None)


def _schemas(root: Any) -> Iterator[Schema]:
    """All schemas in a schema, each after those that contain it."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for key, value in schema.items():
            if key in NAMED and isinstance(value, dict):
                waiting += value.values()
            elif key not in DATA:
                waiting += value if isinstance(value, list) else [value]


def _applied(schema: Schema, root: Any) -> list[list[Schema | None]]:
    """Further schemas of the same object: groups, one of each applies. None stands for one elsewhere."""
    groups = [[part] for part in _list(schema, "allOf")] + [_list(schema, key) for key in ("anyOf", "oneOf")]
    out: list[list[Schema | None]] = [[part for part in group if isinstance(part, dict)] for group in groups]
    return out + ([[_target(schema["$ref"], root)]] if "$ref" in schema else [])


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _target(ref: object, root: Any) -> Schema | None:
    """The schema of a $ref within the document."""
    base, *path = str(ref).split("/")
    schema = root if base == "#" else None
    for name in path:
        schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else None
