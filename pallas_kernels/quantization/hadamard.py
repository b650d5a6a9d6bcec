"""An orthogonal transform of a product's inputs, block by block. It spreads an outlier over its block, so
that the other numbers are represented better with few bits.

For a matrix T with T T^T = g, (x T) (W T)^T / g = x W^T. Weights are transformed once, and x in every
product; only rounding is inexact (QuaRot, arXiv:2404.00456). For blocks of a power of two, T is a Hadamard
matrix of g rows. For blocks of three or nine times a power of two, it is combined with reflections of three
values, so that all inputs are mixed for hidden sizes with such factors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 512  # power of two, and
THREES = 9, 3, 1  # its factors


def block_of(size: int) -> int:
    """Number of inputs that are transformed together, given the total number; 1: none."""
    return min(size & -size, LARGEST) * next(n for n in THREES if size % n == 0)


def gain(block: int) -> int:
    """Transforming numbers twice multiplies them by this."""
    return block & -block


def transform(x: jax.Array, block: int) -> jax.Array:
    """Transforms x [..., in] block by block along the last axis; float32 unless block is 1."""
    if block == 1:
        return x
    two, three = gain(block), block // gain(block)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # the matrix is exact in any dtype
    y = jnp.matmul(
        x.reshape(*x.shape[:-1], -1, two),
        hadamard(two, x.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    for stride in (1, 3):
        if stride < three:
            apart = y.reshape(*x.shape[:-1], -1, 3, stride * two)
            y = apart - apart.sum(-2, keepdims=True) * (2 / 3)
    return y.reshape(x.shape)


def hadamard(size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sylvester's matrix [size, size] of ones and minus ones: the sign of (i, j) is the parity of the bits
    that i and j share.
    """
    index = jnp.arange(size)
    odd = lax.population_count(index[:, None] & index) & 1
    return (1 - 2 * odd).astype(dtype)
