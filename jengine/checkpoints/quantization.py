"""Quantization on load: a parameter is read in the model's dtype, placed, and quantized on the device."""

from __future__ import annotations

import jax

from pallas_kernels.quantized import Quantized, quantize


def plain(target: jax.ShapeDtypeStruct | Quantized) -> jax.ShapeDtypeStruct:
    """What is read for a parameter: its shape and sharding, in the dtype that it stands for."""
    if not isinstance(target, Quantized):
        return target
    return jax.ShapeDtypeStruct(target.values.shape, target.dtype, sharding=target.values.sharding)


def fitted(array: jax.Array, target: jax.ShapeDtypeStruct | Quantized) -> jax.Array | Quantized:
    """A parameter in the form that programs take, from its plain one."""
    if not isinstance(target, Quantized):
        return array
    shardings = jax.tree.map(lambda x: x.sharding, target)
    convert = jax.jit(quantize, static_argnames=("dtype", "inputs"), out_shardings=shardings)
    quantized: Quantized = jax.block_until_ready(convert(array, dtype=target.kind, inputs=target.inputs))
    return quantized
