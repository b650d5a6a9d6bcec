"""Weights that are quantized when their first product runs, fitted to its inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.checkpoints.quantization import fitted
from pallas_kernels.gptq import gptq
from pallas_kernels.groups import Groups
from pallas_kernels.hadamard import gain, transform
from pallas_kernels.int4 import Int4, pack
from pallas_kernels.products import Weight
from pallas_kernels.rows import Rows, array_of
from pallas_kernels.weights import product, weight_of

# An expert is fitted to its own rows and, as if it had them too, to PRIOR rows of all experts and to PRIOR
# uncorrelated rows of the same variance. Measured: squared errors of outputs relative to rounding to nearest,
# in int4, on three texts that were not read, with 16 experts that are parts of two MLPs of SmolLM2-135M.
#
#     median rows of an expert      55    215    880
#     its own alone               0.94   0.82
#     and 128 of all              0.94   0.76   0.67
#     and 128 uncorrelated ones   0.79   0.71   0.66
#     and 256 of both             0.79   0.71   0.66
PRIOR = 128
CHUNK = 512  # rows of an expert that are read together


class Calibrated:
    """A `Weight` that is quantized when its first product runs. If anything else uses it first, it is rounded
    to nearest.
    """

    eager = True

    def __init__(self, weight: jax.Array, target: Int4, count: Any) -> None:
        self.weight = weight
        self.target, self.count = target, count
        self.shape = target.shape
        self.made: Int4 | None = None

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        x = array_of(x)
        if self.made is None:
            flat = self.weight.reshape(-1, self.shape[-1])
            self._keep(self._fitted(flat, _moments(x, self.target.hadamard), self.shape))
        y: jax.Array = _product(x, self.made, dtype=dtype)
        return y

    def grouped_product(self, x: jax.Array, groups: Groups, **how: Any) -> jax.Array:
        """Quantizes each expert's matrix for the rows of its group, and a few of all; see PRIOR."""
        ends = np.cumsum(groups.size).tolist()
        ranges = list(zip([0, *ends], ends, strict=False))
        taken = jnp.zeros(len(x), jnp.bool_).at[groups.place].set(True)  # other places hold any numbers
        chunk = min(CHUNK, len(x))
        x = jnp.pad(jnp.where(taken[:, None], x, 0), ((0, chunk), (0, 0)))
        if self.made is None:
            nothing, block = jnp.zeros((x.shape[1],) * 2), self.target.hadamard
            prior = _prior(_sum(x, 0, ends[-1], nothing, chunk), PRIOR / len(groups.place))
            each = []
            for expert, (start, end) in enumerate(ranges):
                moments = _transformed(_sum(x, start, end, prior, chunk), block)
                flat = _expert(self.weight, expert).reshape(-1, self.shape[-1])
                each.append(self._fitted(flat, moments, self.shape[1:]))
            self._keep(jax.tree.map(lambda *arrays: jnp.stack(arrays), *each))
        y = jnp.zeros((len(x), *self.shape[1:-1]), x.dtype)
        for expert, (start, end) in enumerate(ranges):
            for first in range(start, end, chunk):  # the next expert's replace those beyond the end
                y = _with_product(y, x, self.made, expert, first, chunk)
        return y[:-chunk]

    def take(self, rows: jax.Array) -> jax.Array:
        return weight_of(self.result()).take(rows)

    def __getitem__(self, index: Any) -> Weight:
        return weight_of(self.result())[index]

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Weight:
        return self[expert]

    def result(self) -> Int4:
        """The quantized weight."""
        if self.made is None:
            self.made = fitted(self.weight, self.target)
        assert self.made is not None
        return self.made

    def _fitted(self, flat: jax.Array, moments: jax.Array, shape: tuple[int, ...]) -> Int4:
        """A matrix [outs, in], quantized for inputs with these moments, in the given shape [*out, in]."""
        block, group = self.target.hadamard, self.target.group
        weight = transform(flat.astype(jnp.float32), block) / gain(block)
        parts = (part.reshape(*shape[:-1], -1) for part in gptq(weight, moments, group))
        how: Any = {"group": group, "dtype": self.target.dtype, "inputs": self.target.inputs}
        return pack(*parts, hadamard=block, **how)

    def _keep(self, made: Int4) -> None:
        self.made = jax.device_put(made, jax.tree.map(lambda leaf: leaf.sharding, self.target))
        self.count(1)


def _moments(x: jax.Array, block: int) -> jax.Array:
    """The sum of x^T x over x [N, in], after transforming x by blocks: float32 [in, in]."""
    moments: jax.Array = _transformed(_squared(x), block)
    return moments


@jax.jit
def _squared(x: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x.T, x, precision=precision, preferred_element_type=jnp.float32)


@partial(jax.jit, static_argnames="block")
def _transformed(moments: jax.Array, block: int) -> jax.Array:
    """The moments of transformed inputs.

    Transforming the sum instead of x multiplies bfloat16 numbers exactly, and faster than as float32.
    """
    return transform(transform(moments, block).T, block).T


@partial(jax.jit, static_argnames="chunk")
def _sum(x: jax.Array, start: jax.Array, end: jax.Array, moments: jax.Array, chunk: int) -> jax.Array:
    """Adds x^T x of rows start to end of x [N, in] to moments, float32 [in, in]. At least a chunk follows."""

    def add(i: jax.Array, moments: jax.Array) -> jax.Array:
        first = start + i * chunk
        rows = lax.dynamic_slice_in_dim(x, first, chunk)
        here = first + jnp.arange(chunk) < end
        added: jax.Array = _squared(jnp.where(here[:, None], rows, 0))
        return moments + added

    total: jax.Array = lax.fori_loop(0, (end - start + chunk - 1) // chunk, add, moments)
    return total


@jax.jit
def _prior(moments: jax.Array, share: float) -> jax.Array:
    """A share of these moments, float32 [in, in], and as much of those of uncorrelated inputs."""
    uncorrelated = jnp.diagonal(moments).mean() * jnp.eye(len(moments))
    both: jax.Array = share * (moments + uncorrelated)
    return both


@partial(jax.jit, donate_argnums=0, static_argnames="chunk")
def _with_product(
    y: jax.Array, x: jax.Array, stacked: Int4, expert: jax.Array, first: jax.Array, chunk: int
) -> jax.Array:
    """y [N, *out], with products of a chunk of x [N, in] by an expert's matrix in the chunk's place."""
    rows = product(lax.dynamic_slice_in_dim(x, first, chunk), stacked[expert])
    updated: jax.Array = lax.dynamic_update_slice_in_dim(y, rows.reshape(chunk, *y.shape[1:]), first, 0)
    return updated


# Compiled once for all layers. Outside of jit, control flow would be compiled again at each call.
_product = jax.jit(product, static_argnames="dtype")


@jax.jit
def _expert(weights: jax.Array, expert: jax.Array) -> jax.Array:
    return weights[expert]
