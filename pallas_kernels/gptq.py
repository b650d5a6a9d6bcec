"""GPTQ (arXiv:2210.17323): four-bit weights whose errors cancel on inputs similar to given ones.

Columns are rounded one after the other. Later columns compensate for the error of each, as far as their inputs
are correlated.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4 import HIGHEST, LOWEST, fit

DAMPING = 0.01, 0.1, 1.0  # share of the mean of the moments' diagonal, increased until the inverse is finite
Numbers = tuple[jax.Array, jax.Array, jax.Array]


def gptq(weight: jax.Array, moments: jax.Array, group: int) -> Numbers:
    """Numbers int8 [out, in], scale and offset float32 [out, ceil(in / group)] for weights [out, in].

    Args:
        moments: float32 [in, in]: the sum over inputs x of x^T x.
    """
    missing = -weight.shape[1] % group
    weight = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, missing)), mode="edge")
    moments = jnp.pad(moments, ((0, missing), (0, missing)))
    for damping in DAMPING:
        upper = _inverse_root(moments, damping)
        if bool(jnp.isfinite(upper).all()):
            break
    else:
        raise ValueError("the inputs are not finite")
    numbers, scale, offset = _rounded(weight, upper, group)
    return numbers[:, : weight.shape[1] - missing], scale, offset


@jax.jit
def _inverse_root(moments: jax.Array, damping: float) -> jax.Array:
    """The upper triangular U such that U^T U is the inverse of the damped moments."""
    size = moments.shape[0]
    scale = jnp.maximum(jnp.diagonal(moments).mean(), 1e-30)
    damped = moments / scale + damping * jnp.eye(size)
    # Derived from the factor of the damped moments in reverse order: computing an inverse would lose half of the digits.
    reversed_lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    root = lax.linalg.triangular_solve(reversed_lower, jnp.eye(size), left_side=True, lower=True)
    return root[::-1, ::-1]


@partial(jax.jit, static_argnames="group")
def _rounded(weight: jax.Array, upper: jax.Array, group: int) -> Numbers:
    outs, size = weight.shape

    def one_group(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weight, numbers, scales, offsets = state
        start = index * group
        block = lax.dynamic_slice(weight, (0, start), (outs, group))
        _, scale, offset = fit(block)
        root = lax.dynamic_slice(upper, (start, 0), (group, size))
        own = lax.dynamic_slice(root, (0, start), (group, group))

        def column(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            block, found, errors = state
            value = lax.dynamic_slice(block, (0, i), (outs, 1))
            number = jnp.clip(jnp.round((value - offset) / scale), LOWEST, HIGHEST)
            error = (value - (number * scale + offset)) / own[i, i]
            block = block - error * own[i]
            return (block, *(lax.dynamic_update_slice(x, y, (0, i)) for x, y in ((found, number), (errors, error))))

        empty = jnp.zeros_like(block)
        _, found, errors = lax.fori_loop(0, group, column, (block, empty, empty))
        weight = weight - jnp.matmul(errors, root, precision=lax.Precision.HIGHEST)  # the columns that are done are not read again
        put = lax.dynamic_update_slice
        return weight, put(numbers, found, (0, start)), put(scales, scale, (0, index)), put(offsets, offset, (0, index))

    by_group = jnp.zeros((outs, size // group))
    _, numbers, scales, offsets = lax.fori_loop(0, size // group, one_group, (weight, jnp.zeros_like(weight), by_group, by_group))
    return numbers.astype(jnp.int8), scales, offsets
