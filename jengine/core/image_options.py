"""Options of images: how many a prompt may have, and how they are resized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_whole, parse_object, readable, whole

NAME = "limit_mm_per_prompt"
IMAGE_ROWS = 1024  # embeddings of an image, of families that read images of any size
MOST_IMAGES = 999  # as vLLM's default
OTHERS = ("video", "audio")
PROCESSING = "mm_processor_kwargs"
EDGES = "shortest_edge", "longest_edge"
OLDER = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # names of the same


def image_limit(option: Any) -> int:
    """The most images of a prompt, from the option limit_mm_per_prompt.

    Raises:
        InvalidArgument: naming the field and its limit.
    """
    limits = parse_object(NAME, option, ' such as {"image": 4}')
    for name, value in limits.items():
        if name not in ("image", *OTHERS):
            raise InvalidArgument(f"{NAME}.{name}", value, f"must be one of image, {', '.join(OTHERS)}")
        limits[name] = count = value.get("count", MOST_IMAGES) if isinstance(value, dict) else value
        check_whole(f"{NAME}.{name}", count, 0, MOST_IMAGES)
        if count and name in OTHERS:
            raise InvalidArgument(f"{NAME}.{name}", count, "must be 0: only images are supported")
    return int(limits.get("image", MOST_IMAGES))


def processing_options(option: Any) -> dict[str, Any]:
    """The option mm_processor_kwargs: fields that replace those of preprocessor_config.json. Families have
    some of them.

    Raises:
        InvalidArgument: naming the field and its limit.
    """
    fields = parse_object(PROCESSING, option, ' such as {"max_pixels": 200704}')
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
    return fields


def replaced(processing: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `processing` with those of a request in their places."""
    edges = asked.get("size", {})
    others = {name: value for name, value in processing.items() if OLDER.get(name) not in edges}
    size = {"size": {**others.get("size", {}), **edges}} if edges else {}
    return {**others, **asked, **size}


def check_images(options: ImageOptions) -> None:
    """Raises InvalidArgument if options ask for images and for prompts' embeddings."""
    limit = options.limit_mm_per_prompt
    if options.enable_prompt_embeds and limit is not None and image_limit(limit):
        raise InvalidArgument(NAME, limit, 'must be {"image": 0} with enable_prompt_embeds')


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Images.

    Args:
        limit_mm_per_prompt: the most images of a prompt, as {"image": 4}; by default 999. With {"image": 0},
            a model with images serves text alone, and its encoder of images is not loaded.
        mm_processor_kwargs: fields that replace those of the model's preprocessor_config.json. Qwen's models
            have min_pixels and max_pixels (or size, with shortest_edge and longest_edge, also in pixels),
            SmolVLM and Idefics3 size.longest_edge and do_image_splitting. A request may have others, as long
            as its images have no more embeddings.
        image_pool_rows: the most embeddings of images that the devices hold. A prompt's images must fit; they
            stay for later prompts until others need their place. By default max_model_len, but at most 16384,
            or as many as the largest image has, if that is more. Models that read images of any size scale
            larger images down to this many embeddings, by default to 1024.
        enable_prompt_embeds: a prompt, or parts of it, may be embeddings: {"prompt_embeds": array}. They are
            held in the pool of image_pool_rows, and a model with images then serves text alone.
    """

    limit_mm_per_prompt: Annotated[dict[str, Any] | str | None, readable(image_limit)] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | str | None, readable(processing_options)] = None
    image_pool_rows: Annotated[int | None, whole(1)] = None
    enable_prompt_embeds: bool = False

    @property
    def max_images(self) -> int:
        """The most images of a prompt; none beside prompts' embeddings."""
        return 0 if self.enable_prompt_embeds else image_limit(self.limit_mm_per_prompt)

    def refused(self, why: str) -> InvalidArgument:
        """The error of an engine that has no room for images, nor for prompts' embeddings."""
        if self.enable_prompt_embeds:
            return InvalidArgument("enable_prompt_embeds", True, f"must be False {why}")
        return InvalidArgument(NAME, self.limit_mm_per_prompt, f'must be {{"image": 0}} {why}')

    @property
    def image_processing(self) -> dict[str, Any]:
        """The fields of mm_processor_kwargs."""
        return processing_options(self.mm_processor_kwargs)

    @property
    def image_rows(self) -> int:
        """The most embeddings of an image, if the family reads images of any size."""
        return self.image_pool_rows or IMAGE_ROWS
