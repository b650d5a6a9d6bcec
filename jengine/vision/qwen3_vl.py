"""Images of Qwen3-VL, Qwen3.5 and 3.6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.vision.pixels import squares
from jengine.vision.qwen import QwenVision

if TYPE_CHECKING:
    from flax import nnx


class Qwen3Vision(QwenVision):
    """Images of Qwen3-VL. A patch's place is its row and column, and the image's numbers of both."""

    places, patch_size = 4, 16

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.qwen3_vl_encoder import Encoder

        return Encoder(self.vision, self.preparation, dtype, "visual")

    def ordered(self, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        order = squares(grid, self.preparation.merge)
        return order, np.concatenate([order, np.full_like(order, grid)], axis=1)
