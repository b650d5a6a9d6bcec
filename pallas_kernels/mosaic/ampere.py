"""Common parts of the kernels for `mma.sync`: tiles of shared memory, copies to them, and left sides of
products that are converted in registers, without exchanging data between lanes.

A product of a warp adds DEPTH numbers of each row and column, of which each of four lanes has two pairs.
Their order does not matter if both sides have the same. So a lane takes four adjacent numbers, by one load of
either side (`left_side`, `right_side`). Bytes that are to be transposed are loaded as words of 16 bits, of
which each becomes a number in two rows (`transposed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.words import asm, of_bytes, pair_of, words_of

ROWS = 64  # of a warpgroup's left side
DEPTH = 16  # numbers that a product of a warp adds
NUMBERS = plgpu.Layout.TILED(  # [ROWS, n] of eight or sixteen bits
    plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
INPUTS = plgpu.Layout.TILED(  # [columns, DEPTH]
    plgpu.Tiling(((8, 16), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -2), vector_dim=-1
)
PAIRS = plgpu.Layout.TILED(  # 16 bits [n, DEPTH]: words of two rows, eight in each warp
    plgpu.Tiling(((32, 16), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any], size: int) -> Any:
    """Shared memory in tiles of 8 rows by `size` bytes, swizzled, so that loads of the tensor cores have no
    bank conflicts."""
    tiles = plgpu.TilingTransform((8, size // dtype.itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(size)))  # type: ignore[abstract]


def copy(source: Any, target: Any, landed: Any) -> None:
    """Starts a copy to shared memory; reads nothing outside the source.

    Args:
        landed: the barrier that TMA signals; None: cp.async copies.
    """
    plgpu.copy_gmem_to_smem(source, target, landed, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def gathered(ref: Any, line: Any, column: Any, layout: Any) -> jax.Array:
    """Numbers of an array in global memory.

    Args:
        line, column: int32 arrays of one shape, or one of them a scalar: an index of all axes but the last,
            in the order of memory, and one of the last.
        layout: of the indices and the result. A register has adjacent columns.
    """

    def load(_: Any, ref: Any, *where: Any) -> Any:
        registers = np.empty_like(where[0].registers)
        for at, pointer, element in _pointers(ref, *where):
            vector = ir.VectorType.get(ir.VectorType(where[0].registers[at].type).shape, element)
            registers[at] = llvm.load(vector, pointer)
        return fragment(registers, where[0].layout, mgpu.utils.is_signed(dtype))

    where, dtype = _indices(line, column, layout), ref.dtype
    returned = plgpu.ShapeDtypeStruct(where[0].shape, dtype, layout=layout)
    types = plgpu.RefType(), layout, layout
    numbers: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=returned)(load)(ref, *where)
    return numbers


def scattered(ref: Any, line: Any, column: Any, values: jax.Array, layout: Any) -> None:
    """Writes numbers of an array in global memory.

    Args:
        line, column, layout: as in `gathered`; nothing is written to negative lines. If all lanes of a warp
            have the same numbers, the first writes.
    """

    def put(_: Any, ref: Any, values: Any, *where: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        zero, lane = mgpu.c(0, i32), arith.remui(mgpu.utils.thread_idx(), mgpu.c(32, i32))
        same = all(isinstance(dim, plgpu.Replicated) for dim in where[0].layout.lane_dims)
        for at, pointer, _element in _pointers(ref, *where):
            there = arith.cmpi(arith.CmpIPredicate.sge, _first(where[0].registers[at]), zero)
            if same:
                there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.eq, lane, zero))
            with mgpu.utils.when(there):
                llvm.store(values.registers[at], pointer)

    types = plgpu.RefType(), layout, layout, layout
    plgpu.inline_mgpu(arg_types=types)(put)(ref, values, *_indices(line, column, layout))


def _indices(line: Any, column: Any, layout: Any) -> list[jax.Array]:
    return [plgpu.layout_cast(x, layout) for x in jnp.broadcast_arrays(line, column)]


def _pointers(ref: Any, lines: Any, columns: Any) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """For each register: its index, the pointer to its numbers, and their type."""
    kind, i64 = ir.MemRefType(ref.type), ir.IntegerType.get_signless(64)
    base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))
    for at, register in np.ndenumerate(lines.registers):
        line = arith.muli(arith.extsi(i64, _first(register)), mgpu.c(kind.shape[-1], i64))
        of_line = mgpu.utils.getelementptr(base, [line], kind.element_type)
        column = _first(columns.registers[at])
        yield at, mgpu.utils.getelementptr(of_line, [column], kind.element_type), kind.element_type


def _first(register: Any) -> Any:
    """The first number of a register of int32."""
    first = mgpu.utils.vector_slice(register, slice(0, 1))
    return mgpu.utils.bitcast(first, ir.IntegerType.get_signless(32))


def left_side(numbers: jax.Array, step: int, kind: str, dtype: Any) -> jax.Array:
    """Columns from DEPTH * step on of numbers in NUMBERS, [ROWS, DEPTH] in dtype, a 16-bit float.

    Args:
        kind: of numbers of eight bits, int8 or the bits of fp8; others have dtype.
    """
    returned = plgpu.ShapeDtypeStruct((ROWS, DEPTH), dtype, layout=plgpu.Layout.MMA_LHS(dtype))

    def convert(_: Any, numbers: Any) -> Any:
        registers, layout = left_registers(ROWS, dtype)
        for half in range(2):
            words = words_of(numbers.registers[0, step, 0, 0, half].item())
            pairs = of_bytes(words[0], kind, dtype) if len(words) == 1 else words
            for number, pair in enumerate(pairs):
                registers[0, 0, 0, number, half] = pair_of(pair, dtype)
        return fragment(registers, layout)

    converted: jax.Array = plgpu.inline_mgpu(arg_types=(NUMBERS,), return_type=returned)(convert)(numbers)
    return converted


def right_side(x: jax.Array, *, eight_bits: bool) -> jax.Array:
    """[columns, DEPTH] of 16-bit floats in INPUTS, as [DEPTH, columns], in the order of `left_side`.

    Args:
        eight_bits: whether the left side's numbers have eight bits.
    """
    dtype, shape, layout = x.dtype, x.shape[::-1], plgpu.Layout.MMA_RHS(x.dtype)

    def order(_: Any, x: Any) -> Any:
        layout_of_registers = layout.to_mgpu()
        registers = np.empty(layout_of_registers.registers_shape(shape), object)
        for column, register in enumerate(x.registers.flat):
            words = words_of(register)
            if eight_bits:
                words = [asm(f"prmt.b32 $0, $1, $2, {picked};", *words) for picked in ("0x5410", "0x7632")]
            for place, word in enumerate(words):
                registers[0, column, place] = pair_of(word, dtype)
        return fragment(registers, layout_of_registers)

    returned = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    ordered: jax.Array = plgpu.inline_mgpu(arg_types=(INPUTS,), return_type=returned)(order)(x)
    return ordered


def transposed(ref: Any, size: int, kind: str, dtype: Any) -> jax.Array:
    """int8 or the bits of fp8 [DEPTH, n] in shared memory, as a left side [n, DEPTH] in dtype, a 16-bit
    float.

    The rows are columns of the reference in another order, see `in_order`.

    Args:
        size: of the tiles, see `tiled`.
    """
    rows = ref.shape[1]
    returned = plgpu.ShapeDtypeStruct((rows, DEPTH), dtype, layout=plgpu.Layout.MMA_LHS(dtype))

    def load(_: Any, ref: Any) -> Any:
        stored, i16 = ir.MemRefType(ref.type), ir.IntegerType.get_signless(16)
        strides, _ = stored.get_strides_and_offset()
        shape, strides = list(stored.shape), [*(stride // 2 for stride in strides[:-1]), 1]
        shape[-1] //= 2
        view = ir.MemRefType.get(shape, i16, ir.StridedLayoutAttr.get(0, strides), stored.memory_space)
        words = mgpu.utils.ptr_as_memref(mgpu.utils.memref_ptr(ref), view)
        ways: dict[str, Any] = {"is_signed": True, "layout": PAIRS.to_mgpu(), "optimized": False}
        by_pair = mgpu.utils.memref_transpose(words, (1, 0, 3, 2))
        pairs = mgpu.FragmentedArray.load_tiled(by_pair, size, **ways)
        registers, layout = left_registers(rows, dtype)
        for tile in range(rows // ROWS):
            for half in range(2):
                (word,) = words_of(pairs.registers[tile, 0, 0, half].item())
                for odd, pair in enumerate(of_bytes(word, kind, dtype)):
                    registers[tile, 0, 0, half, odd] = pair_of(pair, dtype)
        return fragment(registers, layout)

    smem = plgpu.RefType(tiled(ref.shape, ref.dtype, size).transforms)
    converted: jax.Array = plgpu.inline_mgpu(arg_types=(smem,), return_type=returned)(load)(ref)
    return converted


def in_order(x: jax.Array) -> jax.Array:
    """Rows of `transposed`, along the last axis of x, in the order of the reference's columns."""
    return x.reshape(*x.shape[:-1], -1, 2, 8).swapaxes(-1, -2).reshape(x.shape)


def fragment(registers: Any, layout: Any, signed: bool | None = None) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def left_registers(rows: int, dtype: Any) -> tuple[Any, Any]:
    """Registers of [rows, DEPTH] to be filled, and their layout."""
    layout = plgpu.Layout.MMA_LHS(dtype).to_mgpu()
    return np.empty(layout.registers_shape((rows, DEPTH)), object), layout
