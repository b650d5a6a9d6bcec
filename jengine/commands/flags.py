"""Command-line flags from dataclasses: one for each field of SamplingParams and EngineConfig, with help from
docstrings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jengine import EngineConfig, LoRARequest, SamplingParams
from jengine.base.options import texts_of, types_in
from jengine.commands.arguments import add_vllm_flags
from jengine.commands.terminal import note
from jengine.vllm.engine_settings import ENGINE
from jengine.vllm.setting import whole_number
from jengine.vllm.translate import VALUES, value_of

# Defaults that differ from SamplingParams: long enough to read, random enough not to loop.
SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 256}
# Of conversations with models that recommend nothing, as in llama.cpp and Ollama.
CHAT_DEFAULTS: dict[str, Any] = {**SAMPLING_DEFAULTS, "top_k": 40}

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
}  # options that take several values after one flag, as in vLLM

LIBRARY_ONLY = re.compile("; None: [^;.]*")  # a flag cannot give None

# --seed is the request's. The engine's seed, for requests without one, would have no further effect.
ENGINE_SKIPS = ("model", "seed")

# options of groups that a short help shows
COMMON_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")
COMMON_ENGINE = ("config", "revision", "dtype", "quantization", "max_model_len")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="`demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id"
    )


def add_lora(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--lora", metavar="PATH", help=f"a LoRA adapter: a folder, or a hub id{more}")


def lora_request(options: argparse.Namespace, engine: dict[str, Any]) -> LoRARequest | None:
    """The adapter of --lora, if it is given; the engine's options then enable adapters."""
    if options.lora is None:
        return None
    engine["enable_lora"] = True
    return LoRARequest("lora", lora_path=options.lora)


def add_sampling_and_engine(
    parser: argparse.ArgumentParser, skip: tuple[str, ...] = (), defaults: dict[str, Any] = SAMPLING_DEFAULTS
) -> None:
    """Adds flags for all fields of SamplingParams, except those in `skip`, and of EngineConfig."""
    add_fields(parser.add_argument_group("sampling"), SamplingParams, skip, defaults)
    add_engine(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds flags for all fields of EngineConfig, and --config."""
    engine = parser.add_argument_group(
        "engine", "May also be set by JENGINE_* variables or in a TOML file, as for `jengine serve`."
    )
    engine.add_argument("--config", metavar="FILE", help="a TOML file of options (also JENGINE_CONFIG)")
    add_fields(engine, EngineConfig, skip=ENGINE_SKIPS)
    add_vllm_flags(parser, ENGINE, note)


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields for SamplingParams: the given flags, and the commands' defaults."""
    return {**SAMPLING_DEFAULTS, **flag_values(options, SamplingParams)}


def engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Engine options given as flags, JENGINE_* variables or in a file, as for `jengine serve`.

    They are validated here, before jax is imported, which takes seconds.

    Raises:
        InvalidArgument: an unknown name or a value out of range; the message says where it was given.
    """
    from jengine.serving.config import naming_source, sourced_options  # plain data; imports no network code

    flags = flag_values(options, EngineConfig, skip=ENGINE_SKIPS)
    config = {} if options.config is None else {"config": options.config}
    sources = sourced_options({**flags, **config})
    fields = {
        name: value
        for name, (value, _) in sources.items()
        if name in EngineConfig.__dataclass_fields__ and name not in ENGINE_SKIPS
    }
    with naming_source(sources):
        EngineConfig.of(options.model, fields)
    return fields


def follows(options: argparse.Namespace) -> bool:
    """Whether the process has a --process-id other than 0, and follows process 0, which takes the requests.
    If so, process 0 has ended when this returns.
    """
    if not getattr(options, "process_id", 0):
        return False
    fields = engine_fields(options)

    from jengine import follow

    follow(EngineConfig.of(options.model, fields), progress=False)
    return True


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
            flag["type"] = partial(value_of, field.name)
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
