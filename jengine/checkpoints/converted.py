"""The folder that `jengine convert` writes. It contains:

- jengine.json, which marks the folder: the version of this format, and the ModelConfig
- params, an Orbax checkpoint of the parameters: see orbax.py
- the model's other files: tokenizer, chat template, generation_config.json
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jengine.base.errors import ModelError
from jengine.base.model_files import malformed
from jengine.models.config import ModelConfig
from jengine.models.hf_config import MAX_SIZE, check
from jengine.models.registry import family_of

MARK = "jengine.json"
PARAMS = "params"
# Changes if ModelConfig's fields are renamed, or if parameters with the same names and shapes get another
# meaning.
FORMAT = 2
REVISION = 2  # of fp8: see Converted
ORBAX_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint")


class _Refused(Exception):
    """What is wrong with a field."""


def is_converted(folder: Path) -> bool:
    """Whether jengine wrote this folder completely: jengine.json is written last."""
    return (folder / MARK).exists()


def has_orbax(folder: Path) -> bool:
    """Whether the folder contains an Orbax checkpoint or a part of one."""
    return any((folder / mark).exists() for mark in ORBAX_MARKS) or any(
        entry.is_dir() for entry in folder.glob(f"{PARAMS}*")
    )


def write_config(folder: Path, config: ModelConfig) -> None:
    """Writes jengine.json."""
    content = {"format": FORMAT, "model": config.plain()}
    (folder / MARK).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def stored_config(fields: dict[str, Any], file: object = MARK) -> ModelConfig:
    """The ModelConfig in the content of jengine.json.

    Raises:
        ModelError: the format or the revision is another version, or a field is unknown, missing or of the
            wrong type.
    """
    if fields.get("format") != FORMAT:
        reason = (
            f"format={fields.get('format')!r} is not the one that this version reads, {FORMAT}; convert the"
            " model again"
        )
        raise ModelError(reason, file=file)
    try:
        with malformed(file):
            model = fields.get("model")
            parts = _parts(model) if isinstance(model, dict) else ()
            config: ModelConfig = dataclasses.replace(
                _record(ModelConfig, model, "model", but=("parts",)), parts=parts
            )
            check(config)
    except _Refused as wrong:
        raise ModelError(str(wrong), file=file) from None
    if (done := config.converted) is not None and done.quantization == "fp8" and done.revision != REVISION:
        reason = (
            "was converted with fp8 by another version, which stored embeddings in another format; convert"
            " the model again"
        )
        raise ModelError(reason, file=file)
    return config


def _parts(model: dict[str, Any]) -> tuple[Any, ...]:
    """The parts of a model, from objects by the names of their types."""
    parts, family = model.get("parts", {}), family_of(str(model.get("family")))
    if not isinstance(parts, dict):
        raise _Refused(f"parts={parts!r} must be an object")
    known = {} if family is None else {kind.__name__: kind for kind in family.parts}
    for name in parts:
        if name not in known:
            raise _Refused(f"parts has an unknown part {name!r}: a newer version wrote it")
    return tuple(_record(known[name], value, name) for name, value in parts.items())


def _record(of: type, value: Any, name: str, but: Collection[str] = ()) -> Any:
    """A dataclass from a JSON object. Fields with defaults may be missing: they are younger than the file.

    Args:
        but: fields that are left out.
    """
    if not isinstance(value, dict):
        raise _Refused(f"{name}={value!r} must be an object")
    hints = get_type_hints(of)
    for field in value:
        if field not in hints:
            raise _Refused(f"{name} has an unknown field {field!r}: a newer version wrote it")
    for field in dataclasses.fields(of):
        if field.name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise _Refused(f"{name} lacks the field {field.name!r}")
    return of(
        **{field: _value(hints[field], item, field) for field, item in value.items() if field not in but}
    )


def _value(hint: Any, value: Any, name: str) -> Any:
    """Converts JSON to the field's type: lists to tuples, and objects to dataclasses."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):  # all unions are with None
        return None if value is None else _value(arguments[0], value, name)
    if origin is Literal:
        return _checked(value in arguments, value, name, f"one of {', '.join(arguments)}")
    if origin is tuple:
        return tuple(
            _value(arguments[0], item, name)
            for item in _checked(isinstance(value, list), value, name, "a list")
        )
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, name)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if hint is int:
        return _checked(type(value) is int and abs(value) <= MAX_SIZE, value, name, "int of 32 bits")
    return _checked(type(value) is hint, value, name, hint.__name__)


def _checked(holds: bool, value: Any, name: str, kind: str) -> Any:
    if not holds:
        raise _Refused(f"{name}={value!r} must be {kind}")
    return value
