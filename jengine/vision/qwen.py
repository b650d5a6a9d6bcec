"""What the vision parts of Qwen's families share: images and prompts."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.vision.family import VISUAL, Patches, require
from jengine.vision.pixels import BICUBIC, fitting, most_fitting, normalized, patches, rgb

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from PIL.Image import Image

OVERRIDES = ("max_pixels", "min_pixels", "size")
# fields of preprocessor_config.json with the only value that is supported
FIXED = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": BICUBIC,
}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How an image becomes patches: resized to a multiple of merge * size pixels, normalized, and cut.

    Attributes:
        least, most: pixels of a resized image.
        size: a patch's height and width.
        merge: an embedding stands for merge x merge patches, which follow one another.
        frames: how often a patch is repeated; a video has several frames.
    """

    least: int
    most: int
    size: int
    merge: int
    frames: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> Self:
        """From preprocessor_config.json's fields and the option mm_processor_kwargs.

        Raises:
            ModelError: a field has a value that is not supported.
            InvalidArgument: an override does.
        """
        require(fields, FIXED)
        if unknown := sorted(set(overrides) - set(OVERRIDES)):
            raise InvalidArgument("mm_processor_kwargs", unknown[0], f"must be one of {', '.join(OVERRIDES)}")
        sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        for options in (fields, overrides):  # the older names win over the newer
            sizes |= options.get("size") or {}
            older = {"shortest_edge": options.get("min_pixels"), "longest_edge": options.get("max_pixels")}
            sizes |= {edge: value for edge, value in older.items() if value is not None}
        least, greatest = int(sizes["shortest_edge"]), int(sizes["longest_edge"])
        patch, merge = int(fields.get("patch_size", 14)), int(fields.get("merge_size", 2))
        if not 0 < least <= greatest or greatest < (patch * merge) ** 2:
            raise InvalidArgument(
                "mm_processor_kwargs.max_pixels" if overrides else "max_pixels",
                greatest,
                f"must be at least min_pixels={least}, and {(patch * merge) ** 2}, of one embedding",
            )
        return cls(
            least=least,
            most=greatest,
            size=patch,
            merge=merge,
            frames=int(fields.get("temporal_patch_size", 2)),
            mean=tuple(fields.get("image_mean") or MEAN),
            std=tuple(fields.get("image_std") or STD),
        )

    @property
    def features(self) -> int:
        return 3 * self.frames * self.size**2

    @property
    def largest(self) -> int:
        """The most patches of an image."""
        embedding = (self.size * self.merge) ** 2  # its pixels
        return most_fitting(self.size * self.merge, self.least, self.most) // embedding * self.merge**2

    def resized(self, image: Image) -> np.ndarray:
        """float32 [3, height, width]."""
        height, width = fitting((image.height, image.width), self.size * self.merge, self.least, self.most)
        return normalized(rgb(image).resize((width, height), BICUBIC), self.mean, self.std)

    def grid(self, resized: np.ndarray) -> tuple[int, int]:
        """How many patches it has."""
        return resized.shape[1] // self.size, resized.shape[2] // self.size

    def pixels(self, resized: np.ndarray, order: np.ndarray) -> np.ndarray:
        """float32 [patches, features]."""
        cells = patches(resized, self.size, order)[:, :, None]
        shape = len(order), 3, self.frames, self.size, self.size
        return np.broadcast_to(cells, shape).reshape(len(order), -1)


class QwenVision(ABC):
    """Images of Qwen's models. An image is one part, with as many patches as its size gives."""

    patch_size: ClassVar[int]  # the family's default
    places: int
    ahead = False
    marker = "<|image_pad|>"

    def __init__(
        self,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        encode: Callable[[str], list[int]] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            config: fields of config.json; processor: of preprocessor_config.json.
            encode: not used; the chat template has put an image's other tokens around it.
            overrides: the option mm_processor_kwargs.
        """
        self.config, self.processor = config, processor
        self.vision: Mapping[str, Any] = config["vision_config"]
        sizes = {
            "patch_size": self.vision.get("patch_size", self.patch_size),
            "merge_size": self.vision.get("spatial_merge_size", 2),
            "temporal_patch_size": self.vision.get("temporal_patch_size", 2),
        }
        for name, size in sizes.items():
            if processor.get(name, size) != size:
                raise ModelError(f"{name}={processor[name]} differs from the vision_config's {size}")
        self.preparation = Preparation.read({**processor, **sizes}, overrides or {})
        self.features = self.preparation.features
        taps = self.vision.get("deepstack_visual_indexes") or ()
        if not {*taps} <= {*range(int(self.vision.get("depth", 0)))} or len({*taps}) != len(taps):
            raise ModelError(f"deepstack_visual_indexes={taps} must be different layers of the encoder")
        self.levels = 1 + len(taps)
        self.patches_per_row = self.smallest = self.preparation.merge**2
        self.largest = self.preparation.largest
        self.most_rows = self.largest // self.patches_per_row
        self.token = self.row_token = int(config["image_token_id"])

    def cut(self, image: Image) -> list[Patches]:
        resized = self.preparation.resized(image)
        grid = self.preparation.grid(resized)
        order, places = self.ordered(grid)
        height, width = (side // self.preparation.merge for side in grid)
        return [Patches(self.preparation.pixels(resized, order), places, height * width, (height, width))]

    def limited(self, rows: int) -> Self:
        pixels = min(self.preparation.most, rows * (self.preparation.size * self.preparation.merge) ** 2)
        overrides = {"min_pixels": min(self.preparation.least, pixels), "max_pixels": pixels}
        return type(self)(self.config, self.processor, overrides=overrides)

    @abstractmethod
    def ordered(self, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of an image's patches in the order in which the encoder reads them, int32
        [patches, 2], and their `Patches.places`.
        """

    def prompt(self, parts: Sequence[Patches]) -> list[int]:
        return [VISUAL] * sum(part.rows for part in parts)

    @abstractmethod
    def module(self, dtype: Any) -> nnx.Module:
        """As in Vision."""

    def encode(self, module: Any, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        out: jax.Array = module(pixels, places, segments)
        return out

    def facts(self) -> dict[str, Any]:
        return {"vision": dict(self.vision), **dataclasses.asdict(self.preparation)}
