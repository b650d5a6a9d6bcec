"""The folder that `jengine convert` writes. It contains:

- jengine.json, which marks the folder: the version of this format, and the ModelConfig
- params, an Orbax checkpoint of the parameters: see orbax.py
- the model's other files: tokenizer, chat template, generation_config.json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jengine.base.errors import ModelError, shown
from jengine.base.model_files import malformed
from jengine.core.quantization import FOUR_BITS
from jengine.models.config import ModelConfig
from jengine.models.hf_config import MAX_SIZE, check
from jengine.models.registry import family_of

MARK = "jengine.json"
PARAMS = "params"
# Changes if ModelConfig's fields are renamed, or if parameters with the same names and shapes get another
# meaning.
FORMAT = 2
# of these values of quantization: see Converted
REVISION, REVISED = 2, ("fp8", *FOUR_BITS)
ORBAX_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint")


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
    with malformed(file):
        model = fields.get("model")
        if not isinstance(model, dict):
            raise ModelError(f"model={model!r} must be an object")
        stored = {name: value for name, value in model.items() if name != "parts"}
        config: ModelConfig = dataclasses.replace(_record(ModelConfig, stored, "model"), parts=_parts(model))
        check(config)
    done = config.converted
    if done is not None and done.quantization in REVISED and done.revision != REVISION:
        reason = f"was converted with {done.quantization} by another version; convert the model again"
        raise ModelError(reason, file=file)
    return config


def _parts(model: dict[str, Any]) -> tuple[Any, ...]:
    """The parts of a model, from objects by the names of their types."""
    parts, family = model.get("parts", {}), family_of(str(model.get("family")))
    if not isinstance(parts, dict):
        raise ModelError(f"parts={parts!r} must be an object")
    known = {} if family is None else {kind.__name__: kind for kind in family.parts}
    for name in parts:
        if name not in known:
            raise ModelError(f"parts has an unknown part {name!r}: a newer version wrote it")
    return tuple(_record(known[name], value, name) for name, value in parts.items())


def _record(of: type, value: Any, name: str) -> Any:
    """A dataclass from a JSON object. Fields with defaults may be missing: they are younger than the file."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # only converted folders need it

    # in a tuple, since a dataclass itself takes no configuration
    adapter = TypeAdapter(tuple[of], config=ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]
    try:
        [record] = adapter.validate_json(json.dumps([value]))
    except ValidationError as wrong:
        error = wrong.errors(include_url=False)[0]
        place = ".".join([name, *map(str, error["loc"][1:])])
        stated = "" if error["type"] == "missing" else f"={shown(error['input'])}"
        newer = ": a newer version wrote it" if error["type"] == "unexpected_keyword_argument" else ""
        raise ModelError(f"{place}{stated}: {error['msg']}{newer}") from None
    if any(abs(number) > MAX_SIZE for number in _whole_numbers(dataclasses.asdict(record))):
        raise ModelError(f"{name} has a whole number of more than 32 bits")
    return record


def _whole_numbers(value: Any) -> Iterator[int]:
    """All whole numbers in dicts and tuples."""
    if type(value) is int:
        yield value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    for item in inside:
        yield from _whole_numbers(item)
