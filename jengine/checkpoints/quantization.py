"""Quantization on load: a parameter is read in the model's dtype, placed on the device, and quantized there.

Parameters that the checkpoint already stores in the wanted form are read as they are, without rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.int4 import Int4, pack, quantize_int4
from pallas_kernels.quantized import Quantized, quantize

PACKING = "group", "parts", "dtype", "kind", "hadamard"
Target = jax.ShapeDtypeStruct | Quantized | Int4  # the form of a parameter in programs, with shardings


def plain(target: Target) -> jax.ShapeDtypeStruct:
    """The array to read for a parameter: its shape and sharding, in the dtype of its unquantized values."""
    if not isinstance(target, Quantized | Int4):
        return target
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.values.sharding)


def fitted(array: jax.Array, target: Target) -> jax.Array | Quantized | Int4:
    """Converts a parameter from its plain form to the form of programs."""
    shardings = jax.tree.map(lambda x: x.sharding, target)
    if isinstance(target, Int4):
        to_int4 = jax.jit(quantize_int4, static_argnames=("group", "parts", "hadamard"), out_shardings=shardings)
        packed: Int4 = jax.block_until_ready(
            to_int4(array, group=target.group, parts=target.shape[-1] // target.size, hadamard=target.hadamard)
        )
        return packed
    if not isinstance(target, Quantized):
        return array
    convert = jax.jit(quantize, static_argnames=("dtype", "inputs", "hadamard"), out_shardings=shardings)
    quantized: Quantized = jax.block_until_ready(convert(array, dtype=target.kind, inputs=target.inputs, hadamard=target.hadamard))
    return quantized


def parts_of(target: Quantized | Int4) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The arrays to read for a parameter that is stored in this form: numbers and scales (offsets have the same
    shape as scales)."""
    if isinstance(target, Quantized):
        return target.values, target.scale  # type: ignore[return-value]
    sharding, shape = target.values.sharding, target.shape
    by_group = (*shape[:-1], shape[-1] // target.group)
    return jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding), jax.ShapeDtypeStruct(by_group, jnp.float32, sharding=sharding)


def joined(numbers: jax.Array, scale: jax.Array, offset: jax.Array | None, target: Quantized | Int4) -> Quantized | Int4:
    """Combines the parts of a parameter."""
    if isinstance(target, Quantized):
        return dataclasses.replace(target, values=numbers, scale=scale)
    parts = target.shape[-1] // target.size
    to_int4 = jax.jit(pack, static_argnames=PACKING, out_shardings=jax.tree.map(lambda x: x.sharding, target))  # a program per shape
    packed: Int4 = jax.block_until_ready(
        to_int4(numbers, scale, offset, group=target.group, parts=parts, dtype=target.dtype, kind=target.kind, hadamard=target.hadamard)
    )
    return packed
