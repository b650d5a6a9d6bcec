"""An orthogonal transform of a product's inputs, block by block: it spreads an outlier over its block, so that few bits represent the rest
better.

For a matrix T with T T^T = g, (x T) (W T)^T / g = x W^T: weights are transformed once, x in every product, and only the
rounding of numbers approximates (QuaRot, arXiv:2404.00456). T is a Hadamard matrix of g rows for blocks of a power of two.
Blocks of three or nine times that combine it with reflections of three, so that all inputs are mixed where hidden sizes
are such numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 512  # power of two, and
THREES = 9, 3, 1  # what it is multiplied by


def block_of(size: int) -> int:
    """How many inputs are transformed together, of so many; 1: none are."""
    return min(size & -size, LARGEST) * next(n for n in THREES if size % n == 0)


def gain(block: int) -> int:
    """Transformed twice, numbers are themselves times this."""
    return block & -block


def transform(x: jax.Array, block: int) -> jax.Array:
    """x [..., in], transformed block by block of the last axis; float32 unless block is 1."""
    if block == 1:
        return x
    two, three = gain(block), block // gain(block)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # the matrix is exact in any dtype
    y = jnp.matmul(x.reshape(*x.shape[:-1], -1, two), hadamard(two, x.dtype), precision=precision, preferred_element_type=jnp.float32)
    for stride in (1, 3):
        if stride < three:
            apart = y.reshape(*x.shape[:-1], -1, 3, stride * two)
            y = apart - apart.sum(-2, keepdims=True) * (2 / 3)
    return y.reshape(x.shape)


def hadamard(size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sylvester's [size, size], of ones and minus ones: entry (i, j) has the sign of the number of bits that i and j share."""
    index = jnp.arange(size)
    odd = lax.population_count(index[:, None] & index) & 1
    return (1 - 2 * odd).astype(dtype)
