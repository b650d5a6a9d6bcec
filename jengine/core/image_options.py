"""Options of images: how many a prompt may have, and how they are resized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument

NAME = "limit_mm_per_prompt"
IMAGE_ROWS = 1024  # embeddings of an image, of families that read images of any size
MOST_IMAGES = 999  # as vLLM's default
OTHERS = ("video", "audio")
PROCESSING = "mm_processor_kwargs"
EDGES = "shortest_edge", "longest_edge"
OLDER = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of the same


def image_limit(given: Any) -> int:
    """The most images of a prompt, from the option limit_mm_per_prompt.

    Raises:
        InvalidArgument: naming the field and its limit.
    """
    if given is None:
        return MOST_IMAGES
    given = _object(NAME, given, '{"image": 4}')
    for name, value in given.items():
        if name not in ("image", *OTHERS):
            raise InvalidArgument(f"{NAME}.{name}", value, f"must be one of image, {', '.join(OTHERS)}")
        count = value.get("count", MOST_IMAGES) if isinstance(value, dict) else value
        check_whole(f"{NAME}.{name}", count, 0, MOST_IMAGES)
        if count and name in OTHERS:
            raise InvalidArgument(f"{NAME}.{name}", count, "must be 0: only images are supported")
    image = given.get("image", MOST_IMAGES)
    return int(image.get("count", MOST_IMAGES) if isinstance(image, dict) else image)


def processing_options(given: Any) -> dict[str, Any]:
    """The option mm_processor_kwargs: fields that replace those of preprocessor_config.json. Families have
    some of them.

    Raises:
        InvalidArgument: naming the field and its limit.
    """
    if given is None:
        return {}
    fields = _object(PROCESSING, given, '{"max_pixels": 200704}')
    for name, value in fields.items():
        where = f"{PROCESSING}.{name}"
        if name in ("min_pixels", "max_pixels", "max_soft_tokens"):
            check_whole(where, value, 1, None)
        elif name == "do_image_splitting":
            if not isinstance(value, bool):
                raise InvalidArgument(where, value, "must be true or false")
        elif name == "size":
            if not isinstance(value, dict) or not value or value.keys() - {*EDGES}:
                raise InvalidArgument(where, value, f"must be an object with {' and '.join(EDGES)}")
            for edge, number in value.items():
                check_whole(f"{where}.{edge}", number, 1, None)
        else:
            known = "min_pixels, max_pixels, size, do_image_splitting, max_soft_tokens"
            raise InvalidArgument(where, value, f"is not supported, only {known}")
    return dict(fields)


def replaced(processing: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `processing` with those of a request in their places."""
    edges = asked.get("size", {})
    kept = {name: value for name, value in processing.items() if OLDER.get(name) not in edges}
    size = {"size": {**kept.get("size", {}), **edges}} if edges else {}
    return {**kept, **asked, **size}


def _object(name: str, given: Any, example: str) -> dict[str, Any]:
    """An object, also as text, where an option's file or variable gave it."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise InvalidArgument(name, given, f"must be an object such as {example}")
    return dict(value)
