"""GPTQ (arXiv:2210.17323): four-bit weights whose errors cancel on inputs similar to given ones.

Columns are rounded one after the other. Later columns compensate for the error of each, as far as their
inputs are correlated. If the inputs deviate from those that the weights were trained for, the weights first
compensate for that (asymmetric calibration, GPTAQ, arXiv:2504.02692).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantization.int4 import HIGHEST, LOWEST, fit

# Share of the mean of the moments' diagonal, increased until the inverse is finite. With 0.01, weights fit
# the given inputs slightly better, but other inputs of the same kind worse.
DAMPING = 0.1, 1.0
TOGETHER = 32  # columns that are rounded before one product updates the others; divides all sizes of groups
Numbers = tuple[jax.Array, jax.Array]


def gptq(weight: jax.Array, moments: jax.Array, group: int, cross: jax.Array | None = None) -> Numbers:
    """Numbers int8 [out, in] and scale float32 [out, ceil(in / group)] for weights [out, in].

    Args:
        moments: float32 [in, in]: the sum over inputs x of x^T x.
        cross: float32 [in, in]: the sum over inputs x of r^T x, where r is the input that x deviates from.
            The outputs from x are fitted to those of the weight from r. None: r is x.
    """
    missing = -weight.shape[1] % group
    weight = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, missing)), mode="edge")
    moments = jnp.pad(moments, ((0, missing), (0, missing)))
    if cross is not None:
        cross = jnp.pad(cross, ((0, missing), (0, missing)))
    for damping in DAMPING:
        upper = _inverse_root(moments, damping)
        if bool(jnp.isfinite(upper).all()):
            break
    else:
        raise ValueError("the inputs are not finite")
    if cross is not None:
        weight = _compensating(weight, moments, cross, upper)
    numbers, scale = _rounded(weight, upper, group)
    return numbers[:, : weight.shape[1] - missing], scale


@jax.jit
def _inverse_root(moments: jax.Array, damping: float) -> jax.Array:
    """The upper triangular U such that U^T U is the inverse of the damped moments, divided by `_scale`."""
    size = moments.shape[0]
    damped = moments / _scale(moments) + damping * jnp.eye(size)
    # Derived from the factor of the damped moments in reverse order: computing an inverse would lose half of
    # the digits.
    reversed_lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    root = lax.linalg.triangular_solve(reversed_lower, jnp.eye(size), left_side=True, lower=True)
    return root[::-1, ::-1]


def _scale(moments: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.diagonal(moments).mean(), 1e-30)


@jax.jit
def _compensating(weight: jax.Array, moments: jax.Array, cross: jax.Array, upper: jax.Array) -> jax.Array:
    """The weight V [out, in] whose outputs x V^T are nearest to r W^T, for the given weight W.

    It minimizes the sum of |r W^T - x V^T|^2 plus the damping times |W - V|^2, so V is W if r is x.
    See `gptq` for moments and cross, and `_inverse_root` for upper.
    """
    missed = _product(weight, (cross - moments) / _scale(moments))
    return weight + _product(_product(missed, upper.T), upper)


@partial(jax.jit, static_argnames="group")
def _rounded(weight: jax.Array, upper: jax.Array, group: int) -> Numbers:
    outs, size = weight.shape

    def one_group(columns: jax.Array, start: jax.Array) -> tuple[jax.Array, Numbers]:
        block = lax.dynamic_slice(columns, (start, 0), (group, outs))
        scale = fit(block.T)[1].T[0]
        root = lax.dynamic_slice(upper, (start, 0), (group, size))
        corner = lax.dynamic_slice(root, (0, start), (group, group))
        numbers, errors = [], []
        for first in range(0, group, TOGETHER):
            after = first + TOGETHER
            step = partial(_column, scale=scale)
            _, (rounded, wrong) = lax.scan(
                step, block[first:after], (jnp.arange(TOGETHER), corner[first:after, first:after])
            )
            block = block.at[after:].add(-_product(corner[first:after, after:].T, wrong))
            numbers.append(rounded)
            errors.append(wrong)
        # The columns that are done are not read again.
        return columns - _product(root.T, jnp.concatenate(errors)), (jnp.concatenate(numbers), scale)

    _, (numbers, scale) = lax.scan(one_group, weight.T, jnp.arange(0, size, group))
    return numbers.reshape(size, outs).T.astype(jnp.int8), scale.T


def _column(block: jax.Array, at: Numbers, scale: jax.Array) -> tuple[jax.Array, Numbers]:
    """Rounds a column of block [columns, outs], and subtracts the error's share from later columns.

    Args:
        at: the column's index, and the row of the root with this index.

    Returns:
        The block, and the column's numbers and errors [outs].
    """
    i, root = at
    number = jnp.clip(jnp.round(block[i] / scale), LOWEST, HIGHEST)
    error = (block[i] - number * scale) / root[i]
    return block - root[:, None] * error, (number, error)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
