"""Options of images: how many a prompt may have."""

from __future__ import annotations

import json
from typing import Any

from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument

NAME = "limit_mm_per_prompt"
IMAGE_ROWS = 1024  # embeddings of an image, of families that read images of any size
MOST_IMAGES = 999  # as vLLM's default
OTHERS = ("video", "audio")


def image_limit(given: Any) -> int:
    """The most images of a prompt, from the option limit_mm_per_prompt.

    Raises:
        InvalidArgument: naming the field and its limit.
    """
    if given is None:
        return MOST_IMAGES
    if isinstance(given, str):  # where an option's file or variable gave it
        try:
            given = json.loads(given)
        except ValueError:
            raise InvalidArgument(NAME, given, 'must be an object such as {"image": 4}') from None
    if not isinstance(given, dict):
        raise InvalidArgument(NAME, given, 'must be an object such as {"image": 4}')
    for name, value in given.items():
        if name not in ("image", *OTHERS):
            raise InvalidArgument(f"{NAME}.{name}", value, f"must be one of image, {', '.join(OTHERS)}")
        count = value.get("count", MOST_IMAGES) if isinstance(value, dict) else value
        check_whole(f"{NAME}.{name}", count, 0, MOST_IMAGES)
        if count and name in OTHERS:
            raise InvalidArgument(f"{NAME}.{name}", count, "must be 0: only images are supported")
    image = given.get("image", MOST_IMAGES)
    return int(image.get("count", MOST_IMAGES) if isinstance(image, dict) else image)
