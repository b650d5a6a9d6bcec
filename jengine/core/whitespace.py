"""Whitespace in generated JSON: options that become part of the schema."""

from __future__ import annotations

import json
from typing import Any

from jengine.base.errors import InvalidArgument

PLACE = "structured_outputs"


def with_whitespace(schema: object, disabled: object, pattern: object) -> dict[str, Any]:
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
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as wrong:
            raise InvalidArgument(f"{PLACE}.json", schema, f"must be valid JSON: {wrong}") from None
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(options, dict):
        raise InvalidArgument(f"{PLACE}.json", schema, f"must be an object, with {name}")
    chosen = {"whitespace_flexible": False} if disabled else {"whitespace_pattern": pattern}
    return {**schema, "x-guidance": {**options, **chosen}}
