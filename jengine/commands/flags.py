"""Command-line flags of SamplingParams and EngineConfig."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from jengine import EngineConfig, InvalidArgument, LoRARequest, SamplingParams
from jengine.commands.terminal import note
from jengine.vllm.flags import add_fields, add_vllm_flags, flag_values
from jengine.vllm.settings import ENGINE

# Defaults that differ from SamplingParams: long enough to read, random enough not to loop.
SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 256}
# Of conversations with models that recommend nothing, as in llama.cpp and Ollama.
CHAT_DEFAULTS: dict[str, Any] = {**SAMPLING_DEFAULTS, "top_k": 40}


# --seed is the request's. The engine's seed, for requests without one, would have no further effect.
ENGINE_SKIPS = ("model", "seed")

# options of groups that a short help shows
COMMON_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")
COMMON_ENGINE = ("config", "revision", "dtype", "quantization", "max_model_len")


# of a flag's value, by its metavar; others are text
TYPES: dict[str, Callable[[str], Any]] = {"N": int, "NUMBER": float, "DAYS": float, "FILE": Path, "DIR": Path}
Form = str | Collection[Any]  # a metavar, or all values
Flag = tuple[str, Form, str] | tuple[str, Form, str, Any]


def add_flags(group: argparse._ActionsContainer, *flags: Flag) -> None:
    """Adds flags that take a value, each with its metavar or its choices, its help, and its default if it has
    one.
    """
    for name, form, text, *default in flags:
        value = default[0] if default else None
        if value is not None:
            text += f" (default: {value:g})" if isinstance(value, float) else f" (default: {value})"
        kind: dict[str, Any] = {"type": type(next(iter(form))), "choices": form}
        if isinstance(form, str):
            kind = {"type": TYPES.get(form, str), "metavar": form}
        group.add_argument(name, default=value, help=text.strip(), **kind)


def add_model(parser: argparse.ArgumentParser, **more: Any) -> None:
    text = "`demo`, a folder in Hugging Face's layout, a GGUF file, or a hub id"
    parser.add_argument("model", metavar="MODEL", help=text, **more)


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
    add_fields(parser.add_argument_group("sampling"), SamplingParams, (*skip, "output_kind"), defaults)
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
        ModelError: there is no such model.
    """
    from jengine.serving.config import naming_source, sourced_options  # plain data; imports no network code
    from jengine.spi import check_model

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
    check_model(options.model)
    return fields


def refuse(options: argparse.Namespace, names: Iterable[str], limit: str) -> None:
    """Raises InvalidArgument for the first of these options that is given."""
    for name in names:
        if getattr(options, name):
            raise InvalidArgument(name, getattr(options, name), limit)


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
