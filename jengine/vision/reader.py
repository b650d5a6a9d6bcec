"""Images that users give with a prompt, as a model reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.core.image_options import PROCESSING, processing_options, replaced
from jengine.core.images import CutImage, PromptImages
from jengine.vision.family import Vision
from jengine.vision.folder import Encode, no_text, served_vision
from jengine.vision.images import cut_image, read_image, with_images

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ImageReader:
    """
    Attributes:
        folder: that of the model's files.
        most: images of a prompt.
        rows: the most embeddings of an image, if the family reads images of any size.
        processing: the engine's mm_processor_kwargs.
        asked: those of a request, beside them.
    """

    vision: Vision
    folder: Path
    most: int
    rows: int
    processing: Mapping[str, Any]
    encode: Encode = field(repr=False)
    asked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        encode: Encode,
        max_images: int,
        rows: int,
        processing: Mapping[str, Any] | None = None,
    ) -> ImageReader | None:
        """That of a model's folder; None: the model reads no images. See `served_vision`."""
        processing = processing_options(processing)
        vision = served_vision(folder, encode, rows, processing) if max_images else None
        return None if vision is None else cls(vision, folder, max_images, rows, processing, encode)

    @classmethod
    def without_text(cls, folder: Path, rows: int, processing: Mapping[str, Any]) -> ImageReader:
        """One that reads images, but places none in a prompt."""
        reader = cls.of(folder, no_text, 1, rows, processing)
        assert reader is not None
        return reader

    def adjusted(self, asked: Mapping[str, Any] | None) -> ImageReader:
        """One for a request's mm_processor_kwargs.

        Raises:
            InvalidArgument: the model has none of this name, or its images would have more embeddings than
                the engine's.
        """
        asked = processing_options(asked)
        if not asked:
            return self
        vision = served_vision(self.folder, self.encode, self.rows, replaced(self.processing, asked))
        assert vision is not None
        if vision.most_rows > self.vision.most_rows or vision.largest > self.vision.largest:
            limit = f"images of {vision.most_rows} embeddings; at most the engine's {self.vision.most_rows}"
            raise InvalidArgument(PROCESSING, dict(asked), limit)
        return replace(self, vision=vision, asked=asked)

    def read(self, source: Any, field: str, *, paths: bool = True) -> CutImage:
        """Reads an image, as `read_image`, unless it has been read."""
        if isinstance(source, CutImage):
            return source
        image: Image = read_image(source, field, paths=paths)
        options = replaced(self.processing, self.asked)
        return cut_image(self.vision, image, field, json.dumps(options, sort_keys=True) if options else "")

    def warm_up(self) -> None:
        """Imports all that reading needs, with a small image."""
        from PIL import Image

        self.read(Image.new("RGB", (64, 64)), "image")

    def check_count(self, count: int, field: str) -> None:
        """Raises InvalidArgument if a prompt may not have so many images."""
        if count > self.most:
            limit = f"at most {counted(self.most, 'image')} in a prompt, see limit_mm_per_prompt"
            raise InvalidArgument(field, counted(count, "image"), limit)

    def placed(
        self, ids: list[int], images: Sequence[CutImage], field: str
    ) -> tuple[list[int], PromptImages | None]:
        """A prompt with its images in the places of its image tokens.

        Raises:
            InvalidArgument: there are too many, or as `with_images`.
        """
        self.check_count(len(images), field)
        return with_images(self.vision, ids, images, field)
