"""Quantization on load: a parameter is read in the model's dtype, placed, and quantized on the device.

Parameters that the checkpoint has in the wanted form are read by their numbers, scales and offsets, and no number changes.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.int4 import Int4, pack, quantize_int4
from pallas_kernels.quantized import Quantized, quantize

Target = jax.ShapeDtypeStruct | Quantized | Int4  # what programs take, with shardings


def plain(target: Target) -> jax.ShapeDtypeStruct:
    """What is read for a parameter: its shape and sharding, in the dtype that it stands for."""
    if not isinstance(target, Quantized | Int4):
        return target
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.values.sharding)


def fitted(array: jax.Array, target: Target) -> jax.Array | Quantized | Int4:
    """A parameter in the form that programs take, from its plain one."""
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
    """What is read for a parameter that is stored in this form: its numbers, and scales (of offsets there are as many)."""
    if isinstance(target, Quantized):
        return target.values, target.scale  # type: ignore[return-value]
    sharding, shape = target.values.sharding, target.shape
    by_group = (*shape[:-1], shape[-1] // target.group)
    return jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding), jax.ShapeDtypeStruct(by_group, jnp.float32, sharding=sharding)


def joined(numbers: jax.Array, scale: jax.Array, offset: jax.Array | None, target: Quantized | Int4) -> Quantized | Int4:
    """A parameter in the form that programs take, from its parts."""
    if isinstance(target, Quantized):
        return dataclasses.replace(target, values=numbers, scale=scale)
    made = partial(
        pack,
        group=target.group,
        parts=target.shape[-1] // target.size,
        dtype=target.dtype,
        kind=target.kind,
        hadamard=target.hadamard,
    )
    packed: Int4 = jax.block_until_ready(jax.jit(made, out_shardings=jax.tree.map(lambda x: x.sharding, target))(numbers, scale, offset))
    return packed
