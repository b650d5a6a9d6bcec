"""Images and prompts of Qwen's vision models: Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.vision.family import VISUAL, Encode, Json, Patches, RowEncoder, require
from jengine.vision.pixels import BICUBIC, fitting, most_fitting, normalized, patches, rgb, squares

if TYPE_CHECKING:
    from flax import nnx
    from PIL.Image import Image

OVERRIDES = ("max_pixels", "min_pixels", "size")
# further fields of preprocessor_config.json with the only value that is supported
FIXED = {"do_normalize": True, "resample": BICUBIC}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class QwenVision(RowEncoder, ABC):
    """Images of Qwen's models. An image is one part, with as many patches as its size gives: it is resized to
    a multiple of merge * size pixels, normalized, and cut.

    Attributes:
        patch_size: the family's default.
        least, most: pixels of a resized image.
        size: a patch's height and width.
        merge: an embedding stands for merge x merge patches, which follow one another.
        frames: how often a patch is repeated; a video has several frames.
    """

    patch_size: ClassVar[int]
    ahead = False
    marker = "<|image_pad|>"

    def __init__(
        self, config: Json, processor: Json, encode: Encode | None = None, overrides: Json | None = None
    ) -> None:
        """
        Args:
            config: fields of config.json; processor: of preprocessor_config.json.
            encode: not used; the chat template has put an image's other tokens around it.
            overrides: the option mm_processor_kwargs.

        Raises:
            ModelError: a field has a value that is not supported.
            InvalidArgument: an override does.
        """
        self.config, self.processor = config, processor
        self.vision: Json = config["vision_config"]
        sizes = {
            "patch_size": self.vision.get("patch_size", self.patch_size),
            "merge_size": self.vision.get("spatial_merge_size", 2),
            "temporal_patch_size": self.vision.get("temporal_patch_size", 2),
        }
        for name, size in sizes.items():
            if processor.get(name, size) != size:
                raise ModelError(f"{name}={processor[name]} differs from the vision_config's {size}")
        require(processor, FIXED)
        self.size, self.merge, self.frames = map(int, sizes.values())
        self.least, self.most = self._limits(overrides or {})
        self.mean = tuple(processor.get("image_mean") or MEAN)
        self.std = tuple(processor.get("image_std") or STD)
        self.features = math.prod(self.patch)
        taps = self.vision.get("deepstack_visual_indexes") or ()
        if not {*taps} <= {*range(int(self.vision.get("depth", 0)))} or len({*taps}) != len(taps):
            raise ModelError(f"deepstack_visual_indexes={taps} must be different layers of the encoder")
        self.levels = 1 + len(taps)
        self.patches_per_row = self.smallest = self.merge**2
        pixels = most_fitting(self.unit, self.least, self.most)
        self.largest = pixels // self.unit**2 * self.patches_per_row
        self.most_rows = self.largest // self.patches_per_row
        self.token = self.row_token = int(config["image_token_id"])

    def _limits(self, overrides: Json) -> tuple[int, int]:
        """`least` and `most`."""
        if unknown := sorted(set(overrides) - set(OVERRIDES)):
            raise InvalidArgument("mm_processor_kwargs", unknown[0], f"must be one of {', '.join(OVERRIDES)}")
        sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        for options in (self.processor, overrides):  # the older names win over the newer
            sizes |= options.get("size") or {}
            older = {"shortest_edge": options.get("min_pixels"), "longest_edge": options.get("max_pixels")}
            sizes |= {edge: value for edge, value in older.items() if value is not None}
        least, greatest = int(sizes["shortest_edge"]), int(sizes["longest_edge"])
        if not 0 < least <= greatest or greatest < self.unit**2:
            raise InvalidArgument(
                "mm_processor_kwargs.max_pixels" if overrides else "max_pixels",
                greatest,
                f"must be at least min_pixels={least}, and {self.unit**2}, of one embedding",
            )
        return least, greatest

    @property
    def unit(self) -> int:
        """Pixels along an embedding."""
        return self.size * self.merge

    @property
    def patch(self) -> tuple[int, int, int, int]:
        """Shape of a patch: colours, frames, height, width."""
        return 3, self.frames, self.size, self.size

    def cut(self, image: Image) -> list[Patches]:
        height, width = fitting((image.height, image.width), self.unit, self.least, self.most)
        resized = normalized(rgb(image).resize((width, height), BICUBIC), self.mean, self.std)
        order, places = self.ordered((height // self.size, width // self.size))
        cells = patches(resized, self.size, order)[:, :, None]
        repeated = np.broadcast_to(cells, (*cells.shape[:2], self.frames, *cells.shape[3:]))
        rows, columns = height // self.unit, width // self.unit
        return [Patches(repeated.reshape(len(order), -1), places, rows * columns, (rows, columns))]

    def limited(self, rows: int) -> Self:
        pixels = min(self.most, rows * self.unit**2)
        overrides = {"min_pixels": min(self.least, pixels), "max_pixels": pixels}
        return type(self)(self.config, self.processor, overrides=overrides)

    @abstractmethod
    def ordered(self, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of an image's patches in the order in which the encoder reads them, int32
        [patches, 2], and their `Patches.places`.
        """

    def prompt(self, parts: Sequence[Patches]) -> list[int]:
        return [VISUAL] * sum(part.rows for part in parts)

    def facts(self) -> dict[str, Any]:
        names = "least", "most", "size", "merge", "frames", "mean", "std"
        return {"vision": dict(self.vision), **{name: getattr(self, name) for name in names}}


class Qwen25Vision(QwenVision):
    """Images of Qwen2.5-VL.

    An image's patches are ordered by windows; the encoder returns embeddings in the image's own order. A
    patch's place is its row and column, the number of its window, and by how many rows its embedding lies too
    early.
    """

    places, patch_size = 4, 14

    @property
    def window(self) -> int:
        """Embeddings along a window."""
        return int(self.vision.get("window_size", 112)) // self.unit

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.qwen_encoder import WindowEncoder

        window = self.window**2 * self.patches_per_row
        return WindowEncoder(self.vision, self.patch, self.merge, window, dtype)

    def ordered(self, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        merge = self.merge
        merged = squares(grid, merge).reshape(-1, merge**2, 2)  # [embeddings, patches of one, 2]
        across = -(-grid[1] // merge // self.window)  # windows
        rows, columns = merged[:, 0].T // merge // self.window
        windows = rows * across + columns
        by_window = np.argsort(windows, kind="stable")
        indices = np.stack([windows[by_window], by_window - np.arange(len(by_window))], axis=1).astype(
            np.int32
        )
        order = merged[by_window].reshape(-1, 2)
        return order, np.concatenate([order, indices.repeat(merge**2, axis=0)], axis=1)


class Qwen3Vision(QwenVision):
    """Images of Qwen3-VL. A patch's place is its row and column, and the image's numbers of both."""

    places, patch_size = 4, 16

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.qwen_encoder import Encoder

        return Encoder(self.vision, self.patch, self.merge, dtype)

    def ordered(self, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        order = squares(grid, self.merge)
        return order, np.concatenate([order, np.full_like(order, grid)], axis=1)
