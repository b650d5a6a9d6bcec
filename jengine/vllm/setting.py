"""One setting of vLLM, and what its values become here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jengine.base.errors import InvalidArgument

Kind = Literal["renamed", "no effect", "not supported"]
EMPTY: tuple[object, ...] = ("", {}, [], (), "{}", "[]")  # values that ask for nothing, as None does


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of vLLM that jengine does not have under this name.

    Attributes:
        kind: renamed: an option of jengine has the same meaning; no effect: any value is accepted, since it
            changes no result; not supported: only the values in `fits` are accepted.
        why: the reason, or what to do instead.
        to: jengine's option, if it is renamed.
        fits: values that ask for what jengine does anyway, accepted without a note; `accepts` tells others of
            these.
        gives: options of jengine by value, if there is no single one for all.
        read: converts a value for `to`.
        variable: an environment variable that the value becomes, for this process and those that it starts.
        flags: vLLM's short flags.
        switch: whether its flag takes no value.
        secret: whether its value must not be shown.
    """

    name: str
    kind: Kind
    why: str = ""
    to: str = ""
    fits: tuple[Any, ...] = ()
    accepts: Callable[[Any], bool] | None = None
    gives: Mapping[Any, dict[str, Any]] = field(default_factory=dict)
    read: Callable[[Any], Any] | None = None
    variable: str = ""
    flags: tuple[str, ...] = ()
    switch: bool = False
    secret: bool = False

    def take(self, value: Any) -> tuple[dict[str, Any], str]:
        """The options that a value becomes, and a note for the user, or "".

        Raises:
            InvalidArgument: the value is not supported.
        """
        if value is None or (isinstance(value, str | dict | list | tuple) and value in EMPTY):
            return {}, ""
        for known, options in self.gives.items():
            if _same(known, value):
                return dict(options), ""
        if self.to:
            return {self.to: value if self.read is None else self.read(value)}, ""
        if any(_same(fit, value) for fit in self.fits) or (self.accepts is not None and self.accepts(value)):
            return {}, ""
        if self.variable:
            _set_variable(self.variable, str(value))
            return {}, ""
        if self.kind == "no effect":
            return {}, f"{self.name}={'...' if self.secret else repr(value)} has no effect: {self.why}"
        accepted = [str(known) for known in (*self.fits, *self.gives) if not isinstance(known, bool)]
        raise InvalidArgument(
            self.name, value, f"must be {' or '.join(accepted)}: {self.why}" if accepted else self.why
        )


def renamed(name: str, to: str, why: str = "", **more: Any) -> Setting:
    return Setting(name, "renamed", why, to, **more)


def no_effect(name: str, why: str, *fits: object, **more: Any) -> Setting:
    return Setting(name, "no effect", why, fits=fits, switch=_switches(fits), **more)


def unsupported(name: str, why: str, *fits: object, **more: Any) -> Setting:
    return Setting(name, "not supported", why, fits=fits, switch=_switches(fits), **more)


def whole_number(text: str) -> int:
    """Reads a whole number as vLLM does: 4k is 4,000, 4K is 4,096, and so on for m, g and t; 25.6k is 25,600.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([+-]?\d+)|(\d+)([KMGT])|(\d+(?:\.\d+)?)([kmgt])", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number")
    plain, binary, power, decimal, thousands = match.groups()
    if plain:
        return int(plain)
    if binary:
        return int(binary) << 10 * ("KMGT".index(power) + 1)
    whole, _, fraction = decimal.partition(".")
    zeros = 3 * ("kmgt".index(thousands) + 1)
    if len(fraction) > zeros:
        raise ValueError(f"{text!r} is not a whole number")
    return int(whole + fraction + "0" * (zeros - len(fraction)))


def at_most(limit: int) -> Callable[[Any], bool]:
    """Accepts whole numbers from 0 to the limit."""
    return lambda value: not isinstance(value, bool) and str(value).isdecimal() and int(value) <= limit


def _set_variable(name: str, value: str) -> None:
    os.environ[name] = value
    constants = sys.modules.get("huggingface_hub.constants")  # it has read the variables
    if hasattr(constants, name):
        setattr(constants, name, value)


def _switches(fits: tuple[object, ...]) -> bool:
    return bool(fits) and all(isinstance(fit, bool) for fit in fits)


def _same(fit: Any, value: Any) -> bool:
    """Whether they are equal; text also equals what it stands for, as in variables and flags."""
    if isinstance(value, str):
        return value.lower() == str(fit).lower()
    return bool(isinstance(fit, bool) == isinstance(value, bool) and fit == value)
