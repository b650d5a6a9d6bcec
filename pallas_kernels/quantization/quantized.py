"""Eight-bit arrays with a scale for each row of their last axis.

A row is what is written and read together: the weights of an output channel, an activation, a token's key of
one head. So stored numbers are never rescaled, and no row's error depends on another row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantization.hadamard import gain, transform
from pallas_kernels.quantization.int4 import Int4

GROUP = 128  # numbers of a row that share a scale, if a row has several
SMALLEST = 1e-30  # minimum for a row's largest magnitude: rows of zeros stay zero
LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale"),
    meta_fields=("dtype", "inputs", "kind", "hadamard"),
)
@dataclass(frozen=True)
class Quantized:
    """Represents values * scale[..., None], transformed back.

    Attributes:
        values: int8 or float8_e4m3fn [..., size]; for a cache uint8, the bits of float8_e4m3fn: on a CPU,
            XLA's gather and scatter would convert all of an fp8 array there and back.
        scale: float32 [...]; or [..., size / 128], one for each group of a row (FP8 checkpoints with blocks).
        dtype: dtype of the represented numbers.
        inputs: whether products quantize their other side too, with a scale for each row or each group of it,
            and multiply eight-bit numbers.
        kind: int8 or float8_e4m3fn.
        hadamard: numbers of a row that were transformed together before quantization; 1: not transformed.
    """

    values: jax.Array
    scale: jax.Array
    dtype: str = "float32"
    inputs: bool = False
    kind: str = "int8"
    hadamard: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def by_group(self) -> bool:
        """Whether a row has several scales."""
        return len(self.scale.shape) == len(self.values.shape)

    def __getitem__(self, index: Any) -> Quantized:
        """Indices of leading axes."""
        return replace(self, values=self.values[index], scale=self.scale[index])

    def dequantized(self) -> jax.Array:
        """The represented array [..., size]."""
        wide = numbers(self).astype(jnp.float32)
        if self.by_group:
            groups = wide.reshape(*self.scale.shape, GROUP) * self.scale[..., None]
            return groups.reshape(wide.shape).astype(self.dtype)
        return transform(wide * self.scale[..., None], self.hadamard).astype(self.dtype)


Pages = jax.Array | Quantized  # of a cache: [num_pages, kv_heads, page_size, head_dim]


def quantize(
    x: jax.Array,
    dtype: jax.typing.DTypeLike,
    *,
    inputs: bool = False,
    hadamard: int = 1,
    by_group: bool = False,
) -> Quantized:
    """Quantizes floats x [..., size] to int8 or float8_e4m3fn. A row's largest magnitude becomes the dtype's
    largest number, or the largest of each group of 128 numbers if these have scales (`by_group`).

    Args:
        inputs, hadamard: as in Quantized; products apply the same transform to the other side.
    """
    largest = LARGEST[jnp.dtype(dtype)]
    wide = transform(x.astype(jnp.float32), hadamard) / gain(hadamard)
    if by_group:
        wide = wide.reshape(*x.shape[:-1], -1, GROUP)
    scale = jnp.maximum(jnp.abs(wide).max(-1), SMALLEST) / largest
    values = (wide / scale[..., None]).reshape(x.shape)
    if jnp.dtype(dtype) == jnp.int8:
        values = jnp.round(values)
    return Quantized(values.astype(dtype), scale, str(x.dtype), inputs, str(jnp.dtype(dtype)), hadamard)


def numbers(x: Quantized) -> jax.Array:
    """The values as x.kind."""
    return lax.bitcast_convert_type(x.values, jnp.dtype(x.kind)) if x.values.dtype == jnp.uint8 else x.values


def movable(x: Quantized) -> Quantized:
    """This weight with fp8 values as bits."""
    return (
        x
        if x.kind == "int8" or x.values.dtype == jnp.uint8
        else replace(x, values=lax.bitcast_convert_type(x.values, jnp.uint8))
    )


def dequantize(x: Quantized | Int4) -> jax.Array:
    """[..., size] of x.dtype."""
    return x.dequantized()
