"""Validation of numbers and sizes given by users."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jengine.base.errors import InvalidArgument


def check_whole(name: str, value: object, low: int, high: int | None) -> None:
    """Raises InvalidArgument unless `value` is a whole number in [low, high]."""
    limit = f"must be a whole number, at least {low}" + ("" if high is None else f" and at most {high}")
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise InvalidArgument(name, value, limit)


def check_number(
    name: str, value: object, low: float, high: float, limit: str, open_low: bool = False
) -> None:
    """Raises InvalidArgument unless `value` is a finite number in [low, high], or (low, high] with
    `open_low`. `limit` is the message.
    """
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high
        and value != math.inf
    )
    if not fits or (open_low and value == low):
        raise InvalidArgument(name, value, f"must be {limit}")


def check_targets(ttft_ms: float | None, tpot_ms: float | None) -> None:
    """Raises InvalidArgument unless each target is None or a finite number of milliseconds above 0."""
    for name, value in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms)):
        if value is not None:
            check_number(name, value, 0.0, math.inf, "a finite number of milliseconds above 0", open_low=True)


def parse_object(name: str, value: object, more: str = "", *, words: str = "") -> dict[str, Any]:
    """Reads an option that is an object, or JSON of an object. None is an empty one.

    Args:
        more: continues the message, as " such as ...".
        words: other values that the message names, as "auto or ".

    Raises:
        InvalidArgument: it is something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise InvalidArgument(name, value, f"must be {words}a JSON object{more}") from None
    if not isinstance(value, Mapping | None):
        raise InvalidArgument(name, value, f"must be {words}an object{more}")
    return dict(value or {})


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Parse a size in bytes: a number, or text such as 512MiB, 2GB, 1.5GiB.

    Raises:
        InvalidArgument: neither.
    """
    if value is None:
        return None
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]I?)?B?\s*", str(value).upper())
    try:
        amount = float(match[1]) * units[match[2] or ""] if match else math.nan
    except ValueError:
        amount = math.nan
    if not amount > 0:
        raise InvalidArgument(name, value, "must be a number of bytes, or text such as 512MiB")
    return int(amount)
