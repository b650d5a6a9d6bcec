"""The compiled pooler: sums the hidden states of prompt tiles, for embeddings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def make_pooler(tile_size: int) -> Callable[..., jax.Array]:
    """The function to compile: (hidden [tokens, hidden_size], ranges int32 [tiles, 2]) -> float32 [tiles, hidden_size].

    Each tile's sum is over its tokens at [start, end); 0 if there are none.
    """

    def pool(hidden: jax.Array, ranges: jax.Array) -> jax.Array:
        tiles = hidden.reshape(-1, tile_size, hidden.shape[-1]).astype(jnp.float32)
        token = jnp.arange(tile_size)
        wanted = (token >= ranges[:, :1]) & (token < ranges[:, 1:])
        return jnp.where(wanted[..., None], tiles, 0.0).sum(1)  # not a product: padding may contain NaN

    return pool
