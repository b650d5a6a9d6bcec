"""Finds the largest values of a vocabulary-sized row block by block, without sorting it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128  # vocabulary entries in a block


def argmax(x: jax.Array) -> jax.Array:
    """jnp.argmax along the last axis of x [rows, size], int32 [rows]: the first of equals. With NaN, any
    token.

    Works in two levels, since on a CPU XLA computes a maximum with SIMD, but an argmax element by element.
    """
    blocks = _blocks(x)
    block = jnp.argmax(blocks.max(-1), -1)
    return (block * BLOCK + jnp.argmax(blocks[jnp.arange(len(x)), block], -1)).astype(jnp.int32)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k along the last axis of x [rows, size]: values and indices int32, both [rows, k], the first of
    equals first.

    The results are all in the k blocks with the largest maxima (the first of equals), since these maxima come
    before any value of another block. With NaN, any indices.
    """
    blocks = _blocks(x)
    if blocks.shape[1] <= k:
        values, ids = lax.top_k(x, k)
        return values, ids.astype(jnp.int32)
    # in index order, so that the first of equals stays first
    chosen = jnp.sort(lax.top_k(blocks.max(-1), k)[1])
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], 1).reshape(len(x), -1)
    values, places = lax.top_k(candidates, k)
    ids = jnp.take_along_axis(chosen, places // BLOCK, 1) * BLOCK + places % BLOCK
    # the last block's padding is above a negative NaN
    return values, jnp.minimum(ids, x.shape[-1] - 1).astype(jnp.int32)


def _blocks(x: jax.Array) -> jax.Array:
    """[rows, blocks, BLOCK]. The last block is padded with -inf."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[-1] % BLOCK)), constant_values=-jnp.inf).reshape(
        len(x), -1, BLOCK
    )
