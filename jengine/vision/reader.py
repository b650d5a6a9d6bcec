"""Images that users give with a prompt, as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.core.images import PromptImages
from jengine.vision.family import Vision
from jengine.vision.folder import Encode, served_vision
from jengine.vision.images import read_image, with_images

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ImageReader:
    """
    Attributes:
        most: images of a prompt.
    """

    vision: Vision
    most: int

    @classmethod
    def of(cls, folder: Path, encode: Encode, most: int, rows: int) -> ImageReader | None:
        """That of a model's folder; None: the model reads no images. See `served_vision`."""
        vision = served_vision(folder, encode, rows) if most else None
        return None if vision is None else cls(vision, most)

    def read(self, source: Any, field: str, *, paths: bool = True) -> Image:
        """See `read_image`."""
        return read_image(source, field, paths=paths)

    def placed(
        self, ids: list[int], images: Sequence[Image], field: str
    ) -> tuple[list[int], PromptImages | None]:
        """A prompt with its images in the places of its image tokens.

        Raises:
            InvalidArgument: there are too many, or as `with_images`.
        """
        if len(images) > self.most:
            limit = f"at most {counted(self.most, 'image')} in a prompt, see limit_mm_per_prompt"
            raise InvalidArgument(field, counted(len(images), "image"), limit)
        return with_images(self.vision, ids, images, field)
