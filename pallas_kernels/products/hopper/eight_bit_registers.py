"""Converts eight-bit numbers in a warpgroup's registers to an operand of the tensor cores.

A thread loads the pairs of adjacent numbers that the operand needs from it. Loads of four numbers would be
half as many, but threads would have to exchange two of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic.words import asm

BITS_OF_128 = 0x43004300  # of a pair in bfloat16; its seven mantissa bits count ones


def operand_of(x: Any, dtype: jnp.dtype[Any], *, in_registers: bool) -> jax.Array:
    """Loads eight-bit numbers [64, n] and converts them exactly to dtype, 16-bit floats.

    Args:
        in_registers: as an operand of the tensor cores. False: use only operations that Pallas interprets.
    """
    loaded: jax.Array = plgpu.load(x, layout=plgpu.Layout.WGMMA)
    if in_registers and x.dtype == jnp.int8 and dtype == jnp.bfloat16:
        returned = plgpu.ShapeDtypeStruct(loaded.shape, dtype, layout=plgpu.Layout.WGMMA)
        widen = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=returned)(_widened)
        widened: jax.Array = widen(loaded)
        return widened
    if x.dtype != jnp.int8:
        loaded = loaded.astype(jnp.float16)  # the hardware converts float8 to float16
    return loaded.astype(dtype)


def _widened(_: Any, x: Any) -> Any:
    """int8 [64, n] -> bfloat16.

    Of a number, seven bits are added to 128. The sign bit doubles the 128 that is then subtracted.
    """
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    code = """{
    .reg .b32 both, low, sign;
    prmt.b32 both, $1, 0, 0x4140;
    lop3.b32 low, both, 0x007f007f, $2, 0xea;
    lop3.b32 sign, both, 0x00800080, $2, 0xea;
    sub.bf16x2 $0, low, sign;
    }"""
    registers = np.empty_like(x.registers)
    for at, register in np.ndenumerate(x.registers):
        numbers = arith.extui(i32, mgpu.utils.bitcast(register, i16))
        registers[at] = mgpu.utils.bitcast(asm(code, numbers, mgpu.c(BITS_OF_128, i32)), pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
