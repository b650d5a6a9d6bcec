"""Flags from dataclasses: each field of SamplingParams and EngineConfig is one, with help from the docstring."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jengine import EngineConfig, SamplingParams

# Where commands differ from SamplingParams: long enough to read, varied enough not to loop.
SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 256}

METAVARS = {str: "TEXT", float: "NUMBER", int: "N"}

LIBRARY_ONLY = re.compile("; None: [^;.]*")  # a flag cannot give None

# --seed is a request's. The engine's, from which requests without one draw theirs, would change nothing more.
ENGINE_SKIPS = ("model", "seed")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="`demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id")


def add_sampling_and_engine(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """A flag for each field of SamplingParams, but for those in `skip`, and of EngineConfig."""
    add_fields(parser.add_argument_group("sampling"), SamplingParams, skip, SAMPLING_DEFAULTS)
    add_engine(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of EngineConfig, and --config."""
    engine = parser.add_argument_group("engine", "Also JENGINE_* variables, and lines of a TOML file, as for `jengine serve`.")
    engine.add_argument("--config", metavar="FILE", help="a TOML file of options (also JENGINE_CONFIG)")
    add_fields(engine, EngineConfig, skip=ENGINE_SKIPS)


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """What SamplingParams is to be made of: the given flags over the commands' defaults."""
    return {**SAMPLING_DEFAULTS, **given_fields(options, SamplingParams)}


def engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given as flags, JENGINE_* variables or in a file, as for `jengine serve`. They are checked here,
    before the seconds that importing jax takes.

    Raises:
        InvalidArgument: an unknown name or a value out of range; says where it was given.
    """
    from jengine.serving.config import given_options, naming_source  # plain data: no network comes with it

    flags = given_fields(options, EngineConfig, skip=ENGINE_SKIPS)
    config = {} if options.config is None else {"config": options.config}
    given = given_options({**flags, **config})
    fields = {name: value for name, (value, _) in given.items() if name in EngineConfig.__dataclass_fields__ and name not in ENGINE_SKIPS}
    with naming_source(given):
        EngineConfig.of(options.model, fields)
    return fields


def add_fields(group: argparse._ArgumentGroup, of: type, skip: tuple[str, ...] = (), defaults: dict[str, Any] | None = None) -> None:
    """A --kebab-case flag for each field of a dataclass, with help from its docstring's Args."""
    hints, helps = get_type_hints(of), _field_helps(of)
    for field in dataclasses.fields(of):
        if field.name in skip:
            continue
        text = _plain(helps.get(field.name, ""), of)
        default = (defaults or {}).get(field.name, field.default)
        flag = _flag(hints[field.name])
        if flag.get("action") == "append":
            text += " (repeatable)"
        if default not in (None, ()):
            text += f" (default: {({True: 'on', False: 'off'}[default]) if isinstance(default, bool) else default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,  # only what was given is passed on
            help=text.replace("%", "%%"),
            **flag,
        )


def given_fields(options: argparse.Namespace, of: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags."""
    names = {field.name for field in dataclasses.fields(of)}.difference(skip)
    return {name: value for name, value in vars(options).items() if name in names}


def _flag(hint: Any) -> dict[str, Any]:
    """argparse's options for a value of this type. Of a union it takes the most general: a list, text, then numbers."""
    kinds = [kind for kind in (get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)) if kind is not type(None)]
    listed = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
    if listed:
        return {"action": "append", "type": listed[0], "metavar": METAVARS[listed[0]]}
    if get_origin(kinds[0]) is dict or dataclasses.is_dataclass(kinds[0]):
        return {"type": _json_object, "metavar": "JSON"}
    if get_origin(kinds[0]) is Literal:
        return {"choices": get_args(kinds[0])}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(kind for kind in (str, float, int) if kind in kinds)
    return {"type": kind, "metavar": METAVARS[kind]}


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _plain(text: str, of: type) -> str:
    """A field's help for users of the command: without clauses about None, and with the numbers that constants stand for."""
    constants = vars(sys.modules[of.__module__])
    return re.sub(r"\bMAX_\w+", lambda name: f"{constants[name[0]]:,}", LIBRARY_ONLY.sub("", text))


def _field_helps(of: type) -> dict[str, str]:
    """The Args section of a docstring: name to text, on one line. Empty under -OO, where there are no docstrings."""
    text = inspect.cleandoc(of.__doc__ or "")  # Python 3.13 takes indentation from docstrings
    section = re.search(r"\nArgs:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
