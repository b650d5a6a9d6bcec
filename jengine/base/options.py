"""Options are fields of dataclasses: annotations hold their types and checks, docstrings their meanings.
Checks of single values are also used by themselves.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jengine.base.errors import InvalidArgument

# Takes an option's name and value. Returns the value to keep, or raises InvalidArgument.
Check = Callable[[str, Any], Any]


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


def check_text(name: str, value: object, low: int, high: int) -> None:
    """Raises InvalidArgument unless `value` is text of `low` to `high` characters."""
    if not isinstance(value, str) or not low <= len(value) <= high:
        shown = f"{len(value)} characters" if isinstance(value, str) and value else value
        limit = f"must be text of {f'{low} to' if low else 'at most'} {high} characters"
        raise InvalidArgument(name, shown, limit)


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


def whole(low: int | None = None, high: int | None = None) -> Check:
    """Whole numbers in [low, high]."""

    def check(name: str, value: Any) -> Any:
        if low is not None:
            check_whole(name, value, low, high)
        elif isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(name, value, "must be a whole number")
        return value

    return check


def number(limit: str, low: float = 0.0, high: float = math.inf, open_low: bool = False) -> Check:
    """Finite numbers in [low, high], or (low, high] with `open_low`. `limit` says so."""

    def check(name: str, value: Any) -> Any:
        check_number(name, value, low, high, limit, open_low)
        return value

    return check


def seconds(*, zero: bool = False) -> Check:
    """Finite numbers above 0, or also 0."""
    return number(f"a number of seconds, {'at least' if zero else 'above'} 0", open_low=not zero)


def one_of(choices: Sequence[object], more: str = "") -> Check:
    """One of these values. `more` continues the message."""

    def check(name: str, value: Any) -> Any:
        if value not in choices:
            raise InvalidArgument(name, value, f"must be one of {', '.join(map(str, choices))}{more}")
        return value

    return check


def is_a(kinds: Any, limit: str, fits: Callable[[Any], object] = lambda value: True) -> Check:
    """Values of these types for which `fits` is true. `limit` is the message."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kinds) or not fits(value):
            raise InvalidArgument(name, value, limit)
        return value

    return check


def path_to(kind: str) -> Check:
    """Paths, not empty, of a `file` or a `folder`."""
    return is_a(str | Path, f"must be a {kind}'s path", lambda value: value != "")


def size(name: str, value: Any) -> Any:
    """Numbers of bytes, or text such as 512MiB."""
    parse_bytes(name, value)
    return value


def readable(read: Callable[[Any], object]) -> Check:
    """Values that `read` does not reject. They are kept as they are."""

    def check(name: str, value: Any) -> Any:
        read(value)
        return value

    return check


def read_as(read: Callable[[Any], object]) -> Check:
    """Values that `read` does not reject, as it returns them."""
    return lambda name, value: read(value)


def check_options(options: Any, place: str = "") -> None:
    """Checks the fields of a frozen dataclass, and stores what the checks return. Defaults need no check, and
    None where the type allows it.

    Raises:
        InvalidArgument: naming the field, after `place`, its value and the limit.
    """
    for name, default, optional, checks in _checks(options.__class__):
        value = getattr(options, name)
        if value is default or (optional and value is None):
            continue
        checked = value
        for check in checks:
            checked = check(place + name, checked)
        if checked is not value:
            object.__setattr__(options, name, checked)


@functools.cache
def _checks(of: type) -> list[tuple[str, object, bool, Sequence[Check]]]:
    """Each field's name, default, whether it may be None, and its checks."""
    hints = get_type_hints(of, include_extras=True)
    return [(field.name, field.default, *_of_hint(hints[field.name])) for field in fields(of)]


def _of_hint(hint: Any) -> tuple[bool, Sequence[Check]]:
    declared: Sequence[Check] = ()
    if get_origin(hint) is Annotated:
        hint, *declared = get_args(hint)
    values = [kind for kind in types_in(hint) if kind is not type(None)]
    optional = len(values) < len(types_in(hint))
    if all(get_origin(kind) is Literal for kind in values):
        choices = [choice for kind in values for choice in get_args(kind)]
        return optional, (*declared, one_of(choices, ", None" if optional else ""))
    if values == [bool]:
        limit = "must be True, False or None" if optional else "must be True or False"
        return optional, (*declared, is_a(bool, limit))
    if not declared and {*values} <= {str, Path}:
        declared = (is_a(str | Path, "must be text or a path"),)
    if not declared:
        raise TypeError(f"{hint}: declare a check, as Annotated[TYPE, CHECK]")
    return optional, declared


def types_in(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the only one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def groups_of(of: type) -> list[type]:
    """The dataclasses that declare a dataclass's fields, in their order: bases from the last, then itself."""
    return [group for group in reversed(of.__mro__) if inspect.get_annotations(group)]


def texts_of(of: type) -> dict[str, str]:
    """What docstrings say of each field, without line breaks. Empty under -OO, which drops docstrings."""
    texts: dict[str, str] = {}
    for group in groups_of(of):
        text = inspect.cleandoc(group.__doc__ or "")  # Python 3.13 removes indentation from docstrings
        section = re.search(r"\nArgs:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", section[1] if section else "", re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts
