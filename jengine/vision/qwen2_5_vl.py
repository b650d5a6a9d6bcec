"""Images of Qwen2.5-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.vision.pixels import squares
from jengine.vision.qwen import QwenVision

if TYPE_CHECKING:
    from flax import nnx


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
        size = self.preparation.size * self.preparation.merge
        return int(self.vision.get("window_size", 112)) // size

    def module(self, dtype: Any) -> nnx.Module:
        from jengine.vision.qwen2_5_vl_encoder import Encoder

        return Encoder(self.vision, self.preparation, self.window**2 * self.patches_per_row, dtype, "visual")

    def ordered(self, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        merge = self.preparation.merge
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
