"""Finds the family of a model's images, and makes it from the files of the model's folder."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument, ModelError
from jengine.base.model_files import malformed, read_object
from jengine.core.image_options import PROCESSING
from jengine.vision.family import Encode, Vision

PROCESSORS = "preprocessor_config.json", "processor_config.json"
MAX_SIZES = {"image_size": 1 << 14, "depth": 1024, "num_hidden_layers": 1024, "mm_tokens_per_image": 1 << 16}
MAX_NUMBER = 1 << 31
# by model_type: the module and the class; imported when needed
FAMILIES = {
    "gemma3": "gemma3:Gemma3Vision",
    "gemma4": "gemma4:Gemma4Vision",
    "idefics3": "smolvlm:SmolVlm",
    "qwen2_5_vl": "qwen:Qwen25Vision",
    "qwen3_5": "qwen:Qwen3Vision",
    "qwen3_5_moe": "qwen:Qwen3Vision",
    "qwen3_vl": "qwen:Qwen3Vision",
    "qwen3_vl_moe": "qwen:Qwen3Vision",
    "smolvlm": "smolvlm:SmolVlm",
}
GROUP = "jengine.images"  # of other packages' entry points: a model_type and a class that makes a Vision


def vision_of(folder: Path, encode: Encode, processing: Mapping[str, Any] | None = None) -> Vision | None:
    """The images of a model; None: it has none, or they are not supported.

    Args:
        encode: text to token ids, see Vision.prompt.
        processing: checked fields that replace those of preprocessor_config.json, see `processing_options`.

    Raises:
        ModelError: a file cannot be read, or a setting is not supported.
        InvalidArgument: so is a field of `processing`.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    config = read_object(file)
    if not isinstance(config.get("vision_config"), dict):
        return None
    make = _maker(str(config.get("model_type")))
    if make is None:
        return None
    try:
        with malformed(file):
            for fields in (config, config["vision_config"]):
                _check_sizes(fields)
            vision: Vision = make(config, _processor(folder), encode, *([processing] if processing else []))
            return vision
    except InvalidArgument as wrong:
        if processing:
            raise
        raise ModelError(f"a field has the wrong type or value: {wrong}", file=file) from None


def _maker(model_type: str) -> Callable[..., Vision] | None:
    if (place := FAMILIES.get(model_type)) is not None:
        module, _, name = place.partition(":")
        make: Callable[..., Vision] = getattr(importlib.import_module(f"jengine.vision.{module}"), name)
        return make
    return next(
        (entry.load() for entry in importlib.metadata.entry_points(group=GROUP, name=model_type)), None
    )


def _processor(folder: Path) -> dict[str, Any]:
    """The fields of both files. Those of preprocessor_config.json win."""
    merged: dict[str, Any] = {}
    for name in reversed(PROCESSORS):
        if (file := folder / name).is_file():
            fields = read_object(file)
            with malformed(file):
                part = fields.get("image_processor") or (fields if name == PROCESSORS[0] else {})
                _check_sizes(part)
                merged |= part
    return merged


def _check_sizes(fields: Mapping[str, Any]) -> None:
    """Checks numbers that images and encoders have, or loop over."""
    for name, value in fields.items():
        if isinstance(value, int | float) and abs(value) > (limit := MAX_SIZES.get(name, MAX_NUMBER)):
            raise ModelError(f"{name}={value} must be at most {limit}")


def served_vision(
    folder: Path, encode: Encode, rows: int, processing: Mapping[str, Any] | None = None
) -> Vision | None:
    """What reads images for an engine; None: the model reads none.

    Args:
        rows: the most embeddings of an image, if the family reads images of any size.
    """
    vision = vision_of(folder, encode, processing)
    if vision is None:
        return None
    limited, options = vision.limited(rows), processing or {}
    largest = "max_pixels" in options or "longest_edge" in options.get("size", ())
    if largest and limited.most_rows < vision.most_rows:
        limit = f"images of {vision.most_rows} embeddings; at most {limited.most_rows}, see image_pool_rows"
        raise InvalidArgument(PROCESSING, dict(options), limit)
    return limited


def no_text(text: str) -> list[int]:
    """In place of a tokenizer, where no prompts are made."""
    raise AssertionError(f"no tokenizer encodes {text!r}")
