"""The encoder of SmolVLM and Idefics3, see `vision.smolvlm`: SigLIP, and neighbouring patches as one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jengine.vision.parts import Linear
from jengine.vision.siglip import Siglip


class Encoder(nnx.Module):
    """pixels float32 [N, features], positions int32 [N] -> [N / per_row, hidden]."""

    def __init__(self, fields: Mapping[str, Any], hidden: int, per_row: int, dtype: Any) -> None:
        self.per_row, name = per_row, "connector.modality_projection.proj"
        self.siglip = Siglip(fields, dtype, "vision_model")
        self.projection = Linear(fields["hidden_size"] * per_row, hidden, dtype, name, biased=False)

    def __call__(self, pixels: jax.Array, positions: jax.Array, frame: int) -> jax.Array:
        x = self.siglip(pixels, positions, frame)
        return self.projection(x.reshape(len(x) // self.per_row, -1))
