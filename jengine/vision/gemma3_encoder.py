"""The encoder of Gemma 3: SigLIP over square images, whose patches are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jengine.vision.parts import Linear, RMSNorm
from jengine.vision.siglip import Siglip


class Encoder(nnx.Module):
    def __init__(
        self, fields: Mapping[str, Any], hidden: int, patches_per_row: int, dtype: jax.typing.DTypeLike
    ) -> None:
        """hidden: of the text model."""
        size, eps, place = fields["hidden_size"], fields["layer_norm_eps"], "multi_modal_projector"
        self.patches_per_row, self.frame = (
            patches_per_row,
            (fields["image_size"] // fields["patch_size"]) ** 2,
        )
        self.siglip = Siglip(fields, dtype, "vision_tower")
        self.mean_norm = RMSNorm(size, eps, dtype, f"{place}.mm_soft_emb_norm", offset=1.0)
        projection = f"{place}.mm_input_projection_weight"
        self.projection = Linear(size, hidden, dtype, projection, biased=False, transposed=True)

    def __call__(self, pixels: jax.Array, places: jax.Array) -> jax.Array:
        """As Vision.encode; bucket and images are whole frames."""
        x = self.siglip(pixels, places[:, 0], self.frame)
        return self.projection(self.mean_norm(x.reshape(-1, self.patches_per_row, x.shape[1]).mean(1)))
