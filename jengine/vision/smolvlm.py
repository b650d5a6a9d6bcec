"""SmolVLM and Idefics3: a SigLIP encoder over square frames, the image's tiles and the whole image.

Each frame has the same number of patches. Its embeddings are blocks of `scale_factor` by `scale_factor`
patches, projected to the text model's hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.vision.family import VISUAL, Encode, Json, Patches, Vision

if TYPE_CHECKING:
    from flax import nnx
    from PIL.Image import Image

LANCZOS = 1  # Pillow's numbers of filters, as in preprocessor_config.json
LONGEST = 4096  # pixels; no resized image is longer
EDGE = "longest_edge"
DEFAULTS = {  # transformers'
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


class SmolVlm(Vision):
    """Images of SmolVLM and Idefics3.

    Args:
        config: config.json.
        processor: preprocessor_config.json, or {}.
        encode: text to token ids, with special tokens where the text has their names. Only `prompt` uses it.
        overrides: the option mm_processor_kwargs: size.longest_edge and do_image_splitting.
    """

    places = levels = 1
    ahead = False

    def __init__(self, config: Json, processor: Json, encode: Encode, overrides: Json | None = None) -> None:
        options = dict(overrides or {})
        for name in options.keys() - {"size", "do_image_splitting"} | options.get("size", {}).keys() - {EDGE}:
            limit = f"only size.{EDGE} and do_image_splitting are supported for this model"
            raise InvalidArgument("mm_processor_kwargs", name, limit)
        if (edge := options.get("size", {}).get(EDGE, 0)) > LONGEST:
            raise InvalidArgument(f"mm_processor_kwargs.size.{EDGE}", edge, f"at most {LONGEST}")
        processor = {**processor, **options}
        vision = {**DEFAULTS, **config.get("vision_config", {})}
        self.vision = {name: vision[name] for name in DEFAULTS}
        self.hidden = int(config["text_config"]["hidden_size"])
        self.scale, self._encode = int(config.get("scale_factor", 2)), encode
        self.row_token = self.token = int(config.get("image_token_id", 128257))
        self.marker = "<image>"
        self.patch = int(vision["patch_size"])
        self.frame = int((processor.get("max_image_size") or {}).get("longest_edge", vision["image_size"]))
        self.longest = int((processor.get("size") or {}).get("longest_edge", 4 * self.frame))
        self.splits = bool(processor.get("do_image_splitting", True))
        self.resample = int(processor.get("resample", LANCZOS))
        self._mean = np.float32(processor.get("image_mean", [0.5] * 3))
        self._std = np.float32(processor.get("image_std", [0.5] * 3))
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not processor.get(name, True):
                raise ModelError(f"{name}=false is not supported", file="preprocessor_config.json")
        self.side = self.frame // self.patch  # patches along a frame
        if self.side % self.scale:
            raise ModelError(f"scale_factor={self.scale} does not divide {self.side} patches of a frame")
        self.smallest = self.largest = self.side**2
        self.features = int(vision["num_channels"]) * self.patch**2
        self.patches_per_row = self.scale**2
        across = math.ceil(min(self.longest, LONGEST) / self.frame)
        frames = across**2 + 1 if self.splits and across > 1 else 1
        self.most_rows = frames * self.smallest // self.patches_per_row
        self._places = self._block(_positions(self.side, int(vision["image_size"]) // self.patch)[..., None])

    # --- on the host --------------------------------------------------------------------------------

    def cut(self, image: Image) -> list[Patches]:
        image = self._resized(image, *_fit(*image.size, self.longest))
        if not self.splits:
            return [self._frame(self._resized(image, self.frame, self.frame), (1, 1))]
        width, height = image.size
        image = self._resized(image, *_multiples(width, height, self.frame))
        rows, columns = image.height // self.frame, image.width // self.frame
        if rows == columns == 1:
            return [self._frame(image, (1, 1))]
        size, parts = self.frame, []
        for row in range(rows):
            for column in range(columns):
                box = column * size, row * size, (column + 1) * size, (row + 1) * size
                parts.append(self._frame(image.crop(box), (rows, columns)))
        return [*parts, self._frame(self._resized(image, size, size), (1, 1))]

    def prompt(self, parts: Sequence[Patches]) -> list[int]:
        """The tiles by rows, each after its name, then the whole image. The number of tiles in a row follows
        from `cut`, which puts the whole image last.
        """
        each = self.smallest // self.patches_per_row
        text, frame = "", "<image>" * each
        if len(parts) > 1:
            rows, columns = _tiles(parts)
            for row in range(rows):
                for column in range(columns):
                    text += f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>{frame}"
                text += "\n"
            text += "\n"
        text += f"<fake_token_around_image><global-img>{frame}<fake_token_around_image>"
        ids = [VISUAL if token == self.token else token for token in self._encode(text)]
        if ids.count(VISUAL) != each * len(parts):
            raise ModelError(f"the tokenizer does not encode <image> as token {self.token}")
        return ids

    def _resized(self, image: Image, width: int, height: int) -> Image:
        return image.resize((width, height), self.resample) if image.size != (width, height) else image

    def _frame(self, image: Image, tiles: tuple[int, int]) -> Patches:
        """A frame. Its grid: one of the whole image has its own height and width in embeddings, a tile those
        of all tiles together.
        """
        pixels = (np.asarray(image, np.float32) * np.float32(1 / 255) - self._mean) / self._std
        patches = pixels.reshape(self.side, self.patch, self.side, self.patch, -1)
        patches = patches.transpose(0, 2, 4, 1, 3).reshape(self.side, self.side, -1)
        rows = self.side // self.scale
        grid = rows * tiles[0], rows * tiles[1]
        return Patches(self._block(patches), self._places, rows**2, grid)

    def _block(self, patches: np.ndarray) -> np.ndarray:
        """[side, side, n] -> [side * side, n], the patches of each embedding together."""
        rows, scale = self.side // self.scale, self.scale
        blocks = patches.reshape(rows, scale, rows, scale, -1).transpose(0, 2, 1, 3, 4)
        flat: np.ndarray = np.ascontiguousarray(blocks.reshape(self.side**2, -1))
        return flat

    # --- the encoder --------------------------------------------------------------------------------

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.siglip import SmolVlmEncoder

        return SmolVlmEncoder(self.vision, self.hidden, self.patches_per_row, self.smallest, dtype)

    def facts(self) -> dict[str, Any]:
        return {"vision": self.vision, "scale": self.scale, "frame": self.frame, "hidden": self.hidden}


def _tiles(parts: Sequence[Patches]) -> tuple[int, int]:
    """Rows and columns of tiles."""
    (height, width), (own_height, own_width) = parts[0].grid, parts[-1].grid
    return height // own_height, width // own_width


def _fit(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with this longest side. The other one keeps the ratio, rounded down to a whole and up to an
    even number.
    """
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > LONGEST:
        width, height = LONGEST, int(LONGEST / ratio)
    elif height > width and height > LONGEST:
        width, height = int(LONGEST * ratio), LONGEST
    return max(width, 1), max(height, 1)


def _multiples(width: int, height: int, frame: int) -> tuple[int, int]:
    """The size in whole frames: the longer side rounded up, then the other in proportion, rounded up."""

    def up(size: float) -> int:
        return math.ceil(size / frame) * frame

    ratio = width / height
    if width >= height:
        width = up(width)
        return width, up(int(width / ratio))
    height = up(height)
    return up(int(height * ratio)), height


def _positions(side: int, table: int) -> np.ndarray:
    """int32 [side, side]: the learned position of each patch of a frame, in a table of `table` by `table`.
    In float32 as transformers computes it, which is exact only for powers of two.
    """
    boundaries = np.arange(1 / table, 1.0, 1 / table).astype(np.float32)
    at = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    bucket = np.searchsorted(boundaries, np.minimum(at, np.float32(1 - 1e-6)), side="right")
    places: np.ndarray = (bucket[:, None] * table + bucket).astype(np.int32)
    return places
