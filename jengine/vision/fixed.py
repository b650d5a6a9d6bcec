"""Fields of preprocessor_config.json with a single value that is supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jengine.base.errors import ModelError


def require(fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Checks that these fields have these values. A missing field and null are accepted.

    Raises:
        ModelError: naming the field and its value.
    """
    for name, value in fixed.items():
        if fields.get(name, value) not in (value, None):
            raise ModelError(f"{name}={fields[name]!r} is not supported, only {value!r}")
