"""Converts eight-bit numbers in a warpgroup's registers to an operand of the tensor cores.

A thread loads four adjacent numbers of a row. The operand needs two of them in the neighbouring thread, so
threads exchange them first, as bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

BITS_OF_128 = 0x43004300  # of a pair in bfloat16; its seven mantissa bits count ones
# Positions in a thread's bytes, and then in those that its neighbour has sent, of the first numbers of both
# pairs and the second ones: of even threads, and of odd ones.
EVEN, ODD = 0x5140, 0x3726


def operand_of(x: Any, dtype: jnp.dtype[Any], *, in_registers: bool) -> jax.Array:
    """Loads eight-bit numbers [64, n] and converts them exactly to dtype, 16-bit floats.

    Args:
        in_registers: as an operand of the tensor cores. False: use only operations that Pallas interprets.
    """
    loaded: jax.Array = plgpu.load(x, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if in_registers and x.dtype == jnp.int8 and dtype == jnp.bfloat16:
        returned = plgpu.ShapeDtypeStruct(loaded.shape, dtype, layout=plgpu.Layout.WGMMA)
        widened: jax.Array = plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,), return_type=returned
        )(_widened)(loaded)
        return widened
    loaded = plgpu.layout_cast(loaded, plgpu.Layout.WGMMA)
    if x.dtype != jnp.int8:
        loaded = loaded.astype(jnp.float16)  # the hardware converts float8 to float16
    return loaded.astype(dtype)


def _widened(_: Any, x: Any) -> Any:
    """int8 [64, n] -> bfloat16."""
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    odd = arith.trunci(ir.IntegerType.get_signless(1), mgpu.utils.thread_idx())
    order = arith.select(odd, mgpu.c(ODD, i32), mgpu.c(EVEN, i32))
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(x.shape), object)
    for at, register in np.ndenumerate(x.registers):
        word = mgpu.utils.bitcast(register, i32)
        both = mgpu.utils.prmt(word, mgpu.utils.shfl_bfly(word, 1), order)
        for index, numbers in enumerate((both, arith.shrui(both, mgpu.c(8, i32)))):
            into = at[0], 2 * at[1] + index, *at[2:-1]
            registers[into] = mgpu.utils.bitcast(_pair(numbers), pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _pair(numbers: Any) -> Any:
    """The int8 numbers in the lower bytes of both halves of a word, as a pair in bfloat16.

    Of a number, seven bits are added to 128. The sign bit doubles the 128 that is then subtracted.
    """
    i32 = ir.IntegerType.get_signless(32)
    code = """{
    .reg .b32 low, sign;
    lop3.b32 low, $1, 0x007f007f, $2, 0xea;
    lop3.b32 sign, $1, 0x00800080, $2, 0xea;
    sub.bf16x2 $0, low, sign;
    }"""
    operands = [numbers, mgpu.c(BITS_OF_128, i32)]
    return llvm.inline_asm(i32, operands, code, "=r,r,r", has_side_effects=False)
