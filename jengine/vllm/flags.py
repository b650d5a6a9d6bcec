"""Flags of a command line: one for each field of a dataclass, with help from its docstring."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jengine.base.options import texts_of, types_in
from jengine.vllm.setting import whole_number
from jengine.vllm.translate import VALUES, value_of

METAVARS = {str: "TEXT", float: "NUMBER", int: "N"}
SHORT = {  # as in vLLM
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
    "speculative_config": "-sc",
}
FILES = ("chat_template",)  # options whose text may be a file
SEVERAL = {
    "lora_modules": "NAME=PATH",
    "lora_target_modules": "NAME",
    "allowed_media_domains": "HOST",
    "served_model_name": "NAME",
}  # options that take several values after one flag, as in vLLM

LIBRARY_ONLY = re.compile("; None: [^;.]*")  # a flag cannot give None


def add_fields(
    group: argparse._ArgumentGroup,
    of: type,
    skip: tuple[str, ...] = (),
    defaults: dict[str, Any] | None = None,
) -> None:
    """Adds a --kebab-case flag for each field of a dataclass, with help from the Args section of its
    docstring.
    """
    hints, helps = get_type_hints(of), texts_of(of)
    for field in dataclasses.fields(of):
        if field.name in skip:
            continue
        text = _plain(helps.get(field.name, ""), of)
        default = (defaults or {}).get(field.name, field.default)
        flag = _flag(hints[field.name])
        if field.name in VALUES:
            flag["type"] = partial(_read_value, field.name, flag.get("type", str))
        if field.name in FILES:
            flag["metavar"] = "FILE"
        if field.name in SEVERAL:
            flag |= {"action": "extend", "nargs": "+", "metavar": SEVERAL[field.name]}
        if flag.get("action") in ("append", "extend"):
            text += " (repeatable)"
        if default not in (None, ()):
            text += (
                " (default:"
                f" {({True: 'on', False: 'off'}[default]) if isinstance(default, bool) else default})"
            )
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            *([SHORT[field.name]] if field.name in SHORT else []),
            dest=field.name,
            default=argparse.SUPPRESS,  # only given options are passed on
            help=text.replace("%", "%%"),
            **flag,
        )


def flag_values(options: argparse.Namespace, of: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags."""
    names = {field.name for field in dataclasses.fields(of)}.difference(skip)
    return {name: value for name, value in vars(options).items() if name in names}


def _flag(hint: Any) -> dict[str, Any]:
    """argparse options for a value of this type. For a union, the most general type: a list, then text, then
    numbers.
    """
    kinds = [kind for kind in types_in(hint) if kind is not type(None)]
    listed = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
    if listed:
        return {"action": "append", "type": _READ.get(listed[0], listed[0]), "metavar": METAVARS[listed[0]]}
    if get_origin(kinds[0]) is dict or dataclasses.is_dataclass(kinds[0]):
        return {"type": _json_or_text if str in kinds else _json_object, "metavar": "JSON"}
    if get_origin(kinds[0]) is Literal:
        return {"choices": tuple(choice for kind in kinds for choice in get_args(kind))}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(kind for kind in (str, float, int) if kind in kinds)
    read = _READ.get(kind, kind)
    words = [word for other in kinds if get_origin(other) is Literal for word in get_args(other)]
    return {"type": lambda text: text if text in words else read(text), "metavar": METAVARS[kind]}


def _read_value(name: str, read: Callable[[str], Any], text: str) -> Any:
    """The value of an option whose values have other names, too."""
    value = value_of(name, text)
    return read(value) if isinstance(value, str) else value


def _whole(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None


_READ: dict[type, Callable[[str], Any]] = {int: _whole}


def _json_or_text(text: str) -> dict[str, Any] | str:
    """A JSON object, or a word such as auto."""
    return _json_object(text) if text.lstrip().startswith("{") else text


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _plain(text: str, of: type) -> str:
    """A field's help text for the command line: without clauses about None, and with numbers in place of
    constants.
    """
    constants = vars(sys.modules[of.__module__])
    return re.sub(r"\bMAX_\w+", lambda name: f"{constants[name[0]]:,}", LIBRARY_ONLY.sub("", text))
