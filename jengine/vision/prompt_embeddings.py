"""Embeddings that prompts give: rows of the pool as they are, in place of an encoder's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.core.images import ImagePart, key_of

if TYPE_CHECKING:
    import jax
    from flax import nnx

LARGEST = 256  # embeddings of a part: prompts with equal parts at their beginning share pages


class PromptEmbeddings:
    """A RowEncoder that passes embeddings on."""

    places, patches_per_row, levels, ahead = 0, 1, 1, False
    smallest = largest = most_rows = LARGEST

    def __init__(self, hidden_size: int) -> None:
        self.features = hidden_size

    def module(self, dtype: Any) -> nnx.Module:
        from flax import nnx

        return nnx.Module()

    def encode(self, module: Any, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        return pixels

    def facts(self) -> dict[str, Any]:
        return {"hidden": self.features}


def parts_of(embeddings: np.ndarray) -> list[ImagePart]:
    """float32 [tokens, hidden] as parts."""
    parts = []
    for start in range(0, len(embeddings), LARGEST):
        rows = np.ascontiguousarray(embeddings[start : start + LARGEST])
        places = np.zeros((len(rows), 0), np.int32)
        parts.append(ImagePart(key_of(rows.tobytes()), rows, places, len(rows), (1, len(rows))))
    return parts
