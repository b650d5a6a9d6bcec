"""Prompts that are embeddings, or have parts that are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jengine.base.errors import InvalidArgument
from jengine.core.images import ImagePart, PromptImages

if TYPE_CHECKING:
    import numpy as np

EMBEDS = "prompt_embeds"  # of a prompt, as in vLLM
DTYPES = ("float32", "bfloat16", "float16")


def with_embeddings(value: Any) -> tuple[list[int], PromptImages | None]:
    """Token ids and embeddings of `prompt_embeds`: an array, or a list of arrays and of lists of ids. The
    ids are 0 at embeddings.

    Raises:
        InvalidArgument: a part is neither, or has another shape, another dtype, or numbers that are not
            finite.
    """
    from jengine.vision.prompt_embeddings import parts_of  # imports numpy, which a server may not need

    ids, positions, parts = list[int](), list[int](), list[ImagePart]()
    items = value if isinstance(value, list) else [value]
    for index, item in enumerate(items):
        if isinstance(item, list):
            ids += item
            continue
        array = _checked(item, f"{EMBEDS}[{index}]" if isinstance(value, list) else EMBEDS)
        positions += range(len(ids), len(ids) + len(array))
        ids += [0] * len(array)
        parts += parts_of(array)
    return ids, PromptImages(tuple(parts), positions) if parts else None


def _checked(value: Any, field: str) -> np.ndarray:
    """An array as float32 [tokens, hidden]. Its values stay: each of DTYPES is a part of float32."""
    import numpy as np

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
