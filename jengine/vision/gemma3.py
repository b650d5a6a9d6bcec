"""Images of Gemma 3: all of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.base.errors import InvalidArgument, ModelError
from jengine.vision.family import VISUAL, Encode, Json, Patches, Vision, require
from jengine.vision.pixels import BILINEAR, normalized, patches, rgb, squares

if TYPE_CHECKING:
    from flax import nnx
    from PIL.Image import Image

# transformers' defaults of vision_config
DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
# further fields of preprocessor_config.json with the only value that is supported
FIXED = {"do_normalize": True, "resample": BILINEAR, "do_pan_and_scan": False}


class Gemma3Vision(Vision):
    """Images of Gemma 3. Every image has the same size, so segments are frames of as many patches. A
    patch's place is the number of its learned position.
    """

    places = levels = 1
    ahead = True
    marker = "<start_of_image>"

    def __init__(self, config: Json, processor: Json, encode: Encode, overrides: Json | None = None) -> None:
        """The arguments are those of `vision`."""
        if overrides:
            raise InvalidArgument(
                "mm_processor_kwargs",
                sorted(overrides)[0],
                "must be empty: this model's images have one size",
            )
        require(processor, FIXED)
        self._vision = {name: config["vision_config"].get(name, value) for name, value in DEFAULTS.items()}
        self._hidden, self._encode = int(config["text_config"].get("hidden_size", 2304)), encode
        self._side, self._size = int(self._vision["image_size"]), int(self._vision["patch_size"])
        across = self._side // self._size
        if processor.get("size") not in (None, {"height": self._side, "width": self._side}):
            raise ModelError(f"size={processor['size']} must be the encoder's, {self._side} x {self._side}")
        self.most_rows = int(config.get("mm_tokens_per_image", 256))
        self._rows = int(self.most_rows**0.5)  # along a side
        pooled = across // self._rows
        if pooled * self._rows != across or self._rows**2 != self.most_rows:
            raise ModelError(
                f"mm_tokens_per_image={self.most_rows} does not divide {across} x {across} patches"
            )
        self.patches_per_row, self.features = pooled**2, 3 * self._size**2
        self.smallest = self.largest = across**2
        self._order = squares((across, across), pooled)
        self._places = (self._order[:, :1] * across + self._order[:, 1:]).astype(np.int32)
        self._mean, self._std = (
            tuple(processor.get(name) or (0.5,) * 3) for name in ("image_mean", "image_std")
        )
        self.token = int(config.get("boi_token_index", 255999))
        self.row_token = int(config.get("image_token_index", config.get("image_token_id", 262144)))
        self._end = int(config.get("eoi_token_index", 256000))

    def cut(self, image: Image) -> list[Patches]:
        resized = rgb(image).resize((self._side, self._side), BILINEAR)
        cells = patches(normalized(resized, self._mean, self._std), self._size, self._order)
        grid = self._rows, self._rows
        return [Patches(cells.reshape(len(cells), -1), self._places, self.most_rows, grid)]

    def prompt(self, parts: Sequence[Patches]) -> list[int]:
        """Between the tokens of its begin and end, and empty lines."""
        space = self._encode("\n\n")
        image = [*space, self.token, *[VISUAL] * self.most_rows, self._end, *space]
        return image * len(parts)

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.siglip import Gemma3Encoder

        return Gemma3Encoder(self._vision, self._hidden, self.patches_per_row, dtype)

    def facts(self) -> dict[str, Any]:
        return {"vision": self._vision, "hidden": self._hidden, "patches_per_row": self.patches_per_row}
