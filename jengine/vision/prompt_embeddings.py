"""Embeddings that prompts give: rows of the pool as they are, in place of an encoder's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jengine.base.errors import InvalidArgument
from jengine.core.images import ImagePart, PromptImages, key_of

if TYPE_CHECKING:
    import jax
    from flax import nnx

DTYPES = ("float32", "bfloat16", "float16")
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


def with_embeddings(name: str, value: Any) -> tuple[list[int], PromptImages | None]:
    """Token ids and embeddings of a prompt: an array, or a list of arrays and of lists of ids. The ids are 0
    at embeddings.

    Args:
        name: of the prompt's field, for errors.

    Raises:
        InvalidArgument: a part is neither, or has another shape, another dtype, or numbers that are not
            finite.
    """
    ids, positions, parts = list[int](), list[int](), list[ImagePart]()
    items = value if isinstance(value, list) else [value]
    for index, item in enumerate(items):
        if isinstance(item, list):
            ids += item
            continue
        array = _checked(item, f"{name}[{index}]" if isinstance(value, list) else name)
        positions += range(len(ids), len(ids) + len(array))
        ids += [0] * len(array)
        parts += parts_of(array)
    return ids, PromptImages(tuple(parts), positions) if parts else None


def _checked(value: Any, field: str) -> np.ndarray:
    """An array as float32 [tokens, hidden]. Its values stay: each of DTYPES is a part of float32."""
    if not hasattr(value, "__array__"):
        raise InvalidArgument(field, type(value).__name__, "must be a float array, or a list of token ids")
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError) as error:  # of torch: bfloat16, or on a device
        raise InvalidArgument(field, type(value).__name__, f"cannot become a NumPy array: {error}") from None
    if array.dtype.name not in DTYPES or array.ndim != 2 or not array.size:
        limit = f"must be [tokens, hidden size], of {', '.join(DTYPES)}, with at least 1 token"
        raise InvalidArgument(field, f"{array.dtype.name}{[*array.shape]}", limit)
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise InvalidArgument(field, f"row {np.isfinite(array).all(axis=1).argmin()}", "must be finite")
    return array
