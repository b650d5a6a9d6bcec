"""Quantization on load: a parameter is read in the model's dtype, placed on the device, and quantized there.

Parameters that the checkpoint already stores in the wanted form are read as they are, without rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4 import Int4, pack, pack_on_host, quantize_int4
from pallas_kernels.quantized import Quantized, quantize

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
        to_int4 = jax.jit(
            quantize_int4, static_argnames=("group", "parts", "hadamard"), out_shardings=shardings
        )
        packed: Int4 = jax.block_until_ready(
            to_int4(
                array, group=target.group, parts=target.shape[-1] // target.size, hadamard=target.hadamard
            )
        )
        return packed
    if not isinstance(target, Quantized):
        return array
    convert = jax.jit(quantize, static_argnames=("dtype", "inputs", "hadamard"), out_shardings=shardings)
    quantized: Quantized = jax.block_until_ready(
        convert(array, dtype=target.kind, inputs=target.inputs, hadamard=target.hadamard)
    )
    return quantized


def parts_of(target: Quantized | Int4) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The arrays to read for a parameter that is stored in this form: numbers and scales (offsets have the
    same shape as scales).
    """
    if isinstance(target, Quantized):
        return target.values, target.scale  # type: ignore[return-value]
    sharding, shape = target.values.sharding, target.shape
    by_group = (*shape[:-1], shape[-1] // target.group)
    return jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding), jax.ShapeDtypeStruct(
        by_group, jnp.float32, sharding=sharding
    )


def joined(
    numbers: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, target: Quantized | Int4
) -> Quantized | Int4:
    """Combines the parts of a parameter and places it on its devices."""
    if isinstance(target, Quantized):
        values, scales = parts_of(target)
        return dataclasses.replace(target, values=placed(numbers, values), scale=placed(scale, scales))
    how: dict[str, Any] = {name: getattr(target, name) for name in ("group", "dtype", "kind", "hadamard")}
    how["parts"] = target.shape[-1] // target.size
    sharding: Any = target.values.sharding
    # compiling a program for each shape would take longer
    if sharding.mesh.devices.flat[0].platform == "cpu":
        packed: Int4 = jax.tree.map(placed, pack_on_host(numbers, scale, offset, **how), target)
        return packed
    number, by_group = parts_of(target)
    parts = (
        placed(numbers, number),
        placed(scale, by_group),
        None if offset is None else placed(offset, by_group),
    )
    # a program per shape
    to_int4 = jax.jit(pack, static_argnames=(*how,), out_shardings=jax.tree.map(lambda x: x.sharding, target))
    packed = jax.block_until_ready(to_int4(*parts, **how))
    return packed


def placed(array: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on its devices; each takes its part."""
    made: jax.Array = jax.block_until_ready(
        jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)
    )
    return made
