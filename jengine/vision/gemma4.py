"""Images of Gemma 4: in their own ratio, scaled to nearly as many embeddings as are allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.vision.family import VISUAL, Encode, Json, Patches, Vision, require
from jengine.vision.pixels import BICUBIC, normalized, patches, rgb, squares

if TYPE_CHECKING:
    from flax import nnx
    from PIL.Image import Image

# transformers' defaults of vision_config
DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3, "patch_size": 16, "position_embedding_size": 10240,
    "use_clipped_linears": False, "standardize": False, "rope_parameters": None, "attention_bias": False,
}  # fmt: skip
# further fields of preprocessor_config.json with the only value that is supported
FIXED = {"do_normalize": False, "resample": BICUBIC}


class Gemma4Vision(Vision):
    """Images of Gemma 4. An image is one part. A patch's place is its column and its row; patches of an
    embedding follow one another.
    """

    places, levels = 2, 1
    marker = "<|image|>"

    def __init__(
        self, config: Json, processor: Json, encode: Encode | None = None, overrides: Json | None = None
    ) -> None:
        """The arguments are those of `vision`. The option mm_processor_kwargs may have max_soft_tokens."""
        if unknown := sorted(set(overrides or ()) - {"max_soft_tokens"}):
            raise InvalidArgument("mm_processor_kwargs", unknown[0], "must be max_soft_tokens")
        require(processor, FIXED)
        text, vision = config["text_config"], config["vision_config"]
        self.config, self.processor = config, processor
        self._vision = {name: vision.get(name, value) for name, value in DEFAULTS.items()}
        if self._vision["attention_bias"]:
            raise ModelError("attention_bias=True is not supported in vision_config")
        if text.get("pad_token_id", 0) not in (0, None):  # whose layer inputs an image's tokens have
            raise ModelError(f"pad_token_id={text['pad_token_id']} is not supported with images, only 0")
        rope = self._vision["rope_parameters"] or {}
        if rope.get("rope_type", "axial") != "axial":
            raise ModelError(
                f"rope_type={rope['rope_type']!r} is not supported in vision_config, only 'axial'"
            )
        self.theta = float(rope.get("rope_theta", 100.0))
        self._hidden = int(text.get("hidden_size", 2304))
        self._size, self._pooled = int(self._vision["patch_size"]), int(self._vision["pooling_kernel_size"])
        for name, expected in (("patch_size", self._size), ("pooling_kernel_size", self._pooled)):
            if processor.get(name, expected) != expected:
                raise ModelError(f"{name}={processor[name]} differs from the vision_config's {expected}")
        self.patches_per_row = self.smallest = self._pooled**2
        self.features = 3 * self._size**2
        self.most_rows = int((overrides or {}).get("max_soft_tokens", processor.get("max_soft_tokens", 280)))
        self.largest = self.most_rows * self.patches_per_row
        if self.most_rows * self._pooled > self._vision["position_embedding_size"]:
            limit = f"position_embedding_size={self._vision['position_embedding_size']} is too small for"
            raise ModelError(f"{limit} max_soft_tokens={self.most_rows}")
        # larger models: in layers with a window
        self.ahead = text.get("use_bidirectional_attention") == "vision"
        self.token = self.row_token = int(config.get("image_token_id", 258880))
        self._around = int(config.get("boi_token_id", 255999)), int(config.get("eoi_token_id", 258882))

    def cut(self, image: Image) -> list[Patches]:
        rows, columns = fitted(image.height, image.width, self._size * self._pooled, self.most_rows)
        unit, side = self._size * self._pooled, self._pooled
        resized = rgb(image).resize((columns * unit, rows * unit), BICUBIC)
        order = squares((rows * side, columns * side), side)
        cells = patches(normalized(resized, (0.0,) * 3, (1.0,) * 3), self._size, order)
        pixels = cells.transpose(0, 2, 3, 1).reshape(len(cells), -1)
        return [Patches(pixels, order[:, ::-1].astype(np.int32), rows * columns, (rows, columns))]

    def limited(self, rows: int) -> Self:
        if rows >= self.most_rows:
            return self
        return type(self)(self.config, self.processor, overrides={"max_soft_tokens": rows})

    def prompt(self, parts: Sequence[Patches]) -> list[int]:
        """Between the tokens of its begin and end."""
        begin, end = self._around
        return [token for part in parts for token in (begin, *[VISUAL] * part.rows, end)]

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.gemma4_encoder import Encoder

        return Encoder(self._vision, self._hidden, self.theta, dtype)

    def facts(self) -> dict[str, Any]:
        return {"vision": self._vision, "hidden": self._hidden, "rows": self.most_rows}


def fitted(height: int, width: int, unit: int, limit: int) -> tuple[int, int]:
    """Rows and columns of an image's embeddings, each of unit x unit pixels: the most that keep its ratio, at
    most `limit` together; at least one of either.
    """
    scale = math.sqrt(limit * unit**2 / (height * width))
    rows, columns = math.floor(scale * height / unit), math.floor(scale * width / unit)
    if not rows:
        return 1, max(1, min(width // height, limit))
    if not columns:
        return max(1, min(height // width, limit)), 1
    return rows, columns
