"""Unpacks four-bit numbers in a warpgroup's registers to an operand of the tensor cores, without exchanging
data between lanes.

A thread loads words j, j + 4, j + 8 and j + 12 of a row's tile. Bits 4 k to 4 k + 3 of both halves of these
words are the pairs of adjacent numbers that the tensor cores expect from this thread in columns 32 k to 32 k
+ 31.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.hopper import COLUMNS, tiled
from pallas_kernels.mosaic.words import words_of
from pallas_kernels.products.four_bit_numbers import PAIR, ScaledNumbers
from pallas_kernels.products.scales_in_registers import elements, layout_of_scales
from pallas_kernels.quantization.int4 import TILE, WORDS

STEP = 2 * WORDS  # columns in the same nibble of all words
WORD_LAYOUT = plgpu.Layout.TILED(  # int32 [64, 4 n], with a word in place of each pair of numbers in WGMMA
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
DEPTH = 16  # columns of a product of the tensor cores
UNIT = 16  # bytes, of addresses in descriptors


def add_scaled(
    total: jax.Array, words: jax.Array, scales: Sequence[jax.Array], x: Any, tile: int, kind: str
) -> jax.Array:
    """Adds a product with words int32 [64, 16], whose numbers are multiplied by their scales first.

    Args:
        total: float32 [64, rows], in units of SCALED.
        scales: scales and perhaps offsets, float32 [64, groups of a tile] each.
        x: bfloat16 or float16 [rows, TILE * n], in shared memory in tiles of 8 by COLUMNS.
        tile: of x.
        kind: of the numbers.

    Returns:
        total plus the product, when the tensor cores are done.
    """
    dtype = x.dtype

    def add(_: Any, total: Any, words: Any, x: Any, *scales: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        sums = [word for register in total.registers.flat for word in words_of(register)]
        count = len(sums)
        names = ", ".join(f"${n}" for n in range(count))
        of = PAIR[str(dtype)].removesuffix("x2")
        shape = f"m64n{2 * count}k{DEPTH}.f32.{of}.{of}"
        first, part = _descriptor(x)
        code = ["wgmma.fence.sync.aligned;"]
        for step in range(TILE // DEPTH):
            left = ", ".join(f"${2 * count + 1 + 4 * step + n}" for n in range(4))
            columns = tile * TILE + step * DEPTH
            place = columns // COLUMNS * part + columns % COLUMNS * 2 // UNIT
            code.append(f"add.s64 x, ${2 * count}, {place};")
            code.append(f"wgmma.mma_async.sync.aligned.{shape} {{{names}}}, {{{left}}}, x, 1, 1, 1, 0;")
        code += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * count),
            [*sums, first, *_scaled(words, scales, kind, dtype)],
            "{\n.reg .b64 x;\n" + "\n".join(code) + "\n}",
            ",".join(["=r"] * count + [*map(str, range(count)), "l"] + ["r"] * (TILE // 4) + ["~{memory}"]),
            has_side_effects=True,
        )
        number = ir.VectorType.get((1,), ir.F32Type.get())
        added = [mgpu.utils.bitcast(llvm.extractvalue(i32, struct, [n]), number) for n in range(count)]
        registers = np.empty_like(total.registers)
        for n, at in enumerate(np.ndindex(registers.shape)):
            registers[at] = mgpu.utils.vector_concat(added[2 * n : 2 * n + 2])
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    smem = plgpu.RefType(tiled(x.shape, x.dtype).transforms)
    types = plgpu.Layout.WGMMA, WORD_LAYOUT, smem, *(layout_of_scales(scale.shape[1]) for scale in scales)
    returned = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=plgpu.Layout.WGMMA)
    run = plgpu.inline_mgpu(arg_types=types, return_type=returned)(add)
    result: jax.Array = run(total, words, x, *scales)
    return result


def _descriptor(x: Any) -> tuple[Any, int]:
    """The descriptor of the first columns of x for the tensor cores, and what it grows by for the next
    COLUMNS. One addition gives another product's; Pallas computes each tile's from its address, in 64 bits.
    """
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    rows, part = (2 * stride // UNIT for stride in ir.MemRefType(x.type).get_strides_and_offset()[0][:2])
    address = arith.trunci(i32, llvm.ptrtoint(i64, mgpu.utils.memref_ptr(x)))
    place = arith.extui(i64, arith.shrui(address, mgpu.c(UNIT.bit_length() - 1, i32)))
    swizzled = 1 << 62  # in rows of 128 bytes
    return arith.ori(place, mgpu.c(swizzled | rows << 32, i64)), part


def _scaled(words: Any, scales: Sequence[Any], kind: str, dtype: jnp.dtype[Any]) -> list[Any]:
    """Pairs of scaled numbers, in units of SCALED, in the order of products and of their registers."""
    i32, (_, count, *_) = ir.IntegerType.get_signless(32), words.registers.shape
    nibbles = TILE // STEP
    pairs = np.empty((nibbles, count, 2), object)
    for half, of_row in enumerate(zip(*(array.registers.flat for array in scales), strict=True)):
        scaled = ScaledNumbers(kind, dtype, [elements(register) for register in of_row])
        for word in range(count):
            register = mgpu.utils.bitcast(words.registers[0, word, 0, 0, half].item(), i32)
            for nibble in range(nibbles):
                pairs[nibble, word, half] = scaled.pair(register, nibble, nibble / nibbles)
    return list(pairs.flat)
