"""The models that a server offers, with the options of each: from the command line and a TOML file."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jengine import EngineConfig, InvalidArgument
from jengine.serving.config import ServerConfig, print_note, resolve_config, sourced_options
from jengine.spi import SERVE_SETTINGS, suggestion, translated

OWN = ("revision", "tokenizer", "chat_template")  # options of the default model that others do not take over
HINTS = get_type_hints(EngineConfig)


class ModelEntry(NamedTuple):
    """A model, and its engine's options."""

    name: str
    engine: EngineConfig


class Table(NamedTuple):
    """A table of the file: a model, and options of its own."""

    name: str
    model: str
    options: dict[str, Any]


def resolve_models(
    flags: Mapping[str, Any], more: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> tuple[ServerConfig, list[ModelEntry]]:
    """The server's options, and the models to serve, the default one first.

    Args:
        flags: see resolve_config.
        more: models of the command line after the first.

    Raises:
        InvalidArgument: as resolve_config; a table of the file is invalid, or two models have one name.
    """
    common = sourced_options(flags, environ, lambda _: None)
    file = common.get("model_config")
    tables = [] if file is None else _tables(Path(file[0]))
    if alone := "model" not in common and bool(tables):
        flags = {**flags, "model": tables[0].model}
    server, engine = resolve_config(flags, environ, print_note)
    served = server.served_names
    default = ModelEntry(served[0] if served else engine.model, engine)
    apart: dict[str, Any] = dict.fromkeys(OWN)
    shared = dataclasses.replace(engine, **apart)
    others = [_entry(table, shared) for table in (*(Table(name, name, {}) for name in more), *tables)]
    if alone:
        entry = _entry(tables[0], engine)
        default = entry._replace(name=served[0] if served else entry.name)
        others = others[1:]
    models = [default, *others]
    names = [*served[1:], *(model.name for model in models)]
    for i, name in enumerate(names):
        if name in names[:i] or name in {module.name for module in _modules(server)}:
            raise InvalidArgument("model", name, "is the name of two models; see --model-config for names")
    if len(models) > 1 and engine.num_processes > 1:
        raise InvalidArgument("num_processes", engine.num_processes, "must be 1 with several models")
    addresses = [events.endpoint for model in models if (events := model.engine.page_events) is not None]
    for i, address in enumerate(addresses):
        if address in addresses[:i]:
            limit = "is the endpoint of two models; give each its own in --model-config"
            raise InvalidArgument("kv_events_config.endpoint", address, limit)
    return server, models


def _modules(server: ServerConfig) -> Any:
    return server.lora_modules or ()


def _tables(file: Path) -> list[Table]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as wrong:
        raise InvalidArgument("model_config", str(file), f"cannot be read: {wrong}") from None
    models = content.pop("models", None)
    if content or not isinstance(models, dict) or not models:
        raise InvalidArgument(
            "model_config", str(file), 'must have tables [models.NAME] only, each with model = "..."'
        )
    return [_table(file, name, options) for name, options in models.items()]


def _table(file: Path, name: str, options: Any) -> Table:
    where = f"{file}, models.{name}"
    if not isinstance(options, dict) or not isinstance(options.get("model"), str):
        raise InvalidArgument("model", None, f'must be given as model = "..." ({where})')
    entries = {}
    for option, value in options.items():
        option = option.replace("-", "_")
        try:
            translation, _ = translated({option: value}, HINTS, SERVE_SETTINGS)
        except ValueError as wrong:  # InvalidArgument, too
            limit = wrong.limit if isinstance(wrong, InvalidArgument) else str(wrong)
            raise InvalidArgument(option, value, f"{limit} ({where})") from None
        for field in translation:
            if field not in HINTS:
                hint = suggestion(field, HINTS)
                raise InvalidArgument(field, value, f"is no option of an engine ({where}){hint}")
        entries.update(translation)
    return Table(name, entries.pop("model"), entries)


def _entry(table: Table, shared: EngineConfig) -> ModelEntry:
    try:
        return ModelEntry(table.name, dataclasses.replace(shared, **{**table.options, "model": table.model}))
    except InvalidArgument as wrong:
        raise InvalidArgument(wrong.field, wrong.value, f"{wrong.limit} (model {table.name})") from None
