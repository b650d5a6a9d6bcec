"""Finds the family of a model's images, and makes it from the files of the model's folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.image_options import PROCESSING
from jengine.vision.family import Vision

Encode = Callable[[str], list[int]]  # text to token ids
PROCESSORS = "preprocessor_config.json", "processor_config.json"
# by model_type: the module and the class; imported when needed
FAMILIES = {
    "gemma3": ("gemma3", "Gemma3Vision"),
    "gemma4": ("gemma4", "Gemma4Vision"),
    "idefics3": ("smolvlm", "SmolVlm"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen25Vision"),
    "qwen3_5": ("qwen3_vl", "Qwen3Vision"),
    "qwen3_5_moe": ("qwen3_vl", "Qwen3Vision"),
    "qwen3_vl": ("qwen3_vl", "Qwen3Vision"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3Vision"),
    "smolvlm": ("smolvlm", "SmolVlm"),
}


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
    config = _read(file)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not isinstance(config.get("vision_config"), dict):
        return None
    module, name = family
    make = getattr(importlib.import_module(f"jengine.vision.{module}"), name)
    processor: dict[str, Any] = {}
    for name in reversed(PROCESSORS):
        if (folder / name).is_file():
            fields = _read(folder / name)
            processor |= fields.get("image_processor") or (fields if name == PROCESSORS[0] else {})
    try:
        vision: Vision = make(config, processor, encode, *([processing] if processing else []))
        return vision
    except KeyError as missing:
        raise ModelError(f"field {missing} is missing", file=file) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        if processing and isinstance(wrong, InvalidArgument):
            raise
        raise ModelError(f"a field has the wrong type or value: {wrong}", file=file) from None


def served_vision(
    folder: Path, encode: Encode, rows: int, processing: Mapping[str, Any] | None = None
) -> Vision | None:
    """The same for an engine.

    Args:
        rows: the most embeddings of an image, if the family reads images of any size.
    """
    vision = vision_of(folder, encode, processing)
    if vision is None:
        return None
    limited, given = vision.limited(rows), processing or {}
    largest = "max_pixels" in given or "longest_edge" in given.get("size", ())
    if largest and limited.most_rows < vision.most_rows:
        limit = f"images of {vision.most_rows} embeddings; at most {limited.most_rows}, see image_pool_rows"
        raise InvalidArgument(PROCESSING, dict(given), limit)
    return limited


def no_text(text: str) -> list[int]:
    """In place of a tokenizer, where no prompts are made."""
    raise AssertionError(f"no tokenizer encodes {text!r}")


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", file=file) from None
    if not isinstance(content, dict):
        raise ModelError("is not a JSON object", file=file)
    return content
