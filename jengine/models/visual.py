"""Embeddings of images with several levels (DeepStack, Meng et al. 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jengine.models.layers import Attend
from pallas_kernels.products.rows import Sum


def with_deeper_images(x: jax.Array | Sum, attend: Attend, layer: int) -> jax.Array | Sum:
    """The residual stream [N, hidden] after a layer, with an image's next level, if its rows have one more.

    The first level takes the place of a token's own embedding, see `layers.with_images`. Each of the others,
    of hidden size as well, is added after one of the first layers.
    """
    visual, hidden = getattr(attend, "visual", None), x.shape[1]
    if visual is None or (layer + 1) * hidden >= visual.rows.shape[1]:
        return x
    level = visual.rows[:, (layer + 1) * hidden : (layer + 2) * hidden]
    return Sum(x, jnp.where(visual.here[:, None], level, 0).astype(x.dtype))
