"""Finds the family of a model's images, and makes it from the files of the model's folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jengine.base.errors import ModelError
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


def vision_of(folder: Path, encode: Encode) -> Vision | None:
    """The images of a model; None: it has none, or they are not supported.

    Args:
        encode: text to token ids, see Vision.prompt.

    Raises:
        ModelError: a file cannot be read, or a setting is not supported.
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
        vision: Vision = make(config, processor, encode)
        return vision
    except KeyError as missing:
        raise ModelError(f"field {missing} is missing", file=file) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise ModelError(f"a field has the wrong type or value: {wrong}", file=file) from None


def served_vision(folder: Path, encode: Encode, rows: int) -> Vision | None:
    """The same for an engine.

    Args:
        rows: the most embeddings of an image, if the family reads images of any size.
    """
    vision = vision_of(folder, encode)
    return None if vision is None else vision.limited(rows)


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
