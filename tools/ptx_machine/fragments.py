"""Which number of a matrix lies in which register of which lane (PTX ISA, "Matrix fragments" of mma.m16n8k*,
"Register fragments" of wgmma.mma_async, `ldmatrix`, `stmatrix`).

With 4 * group + t the number of a lane, and `per` numbers in a register of 32 bits:

- A [16, K]: register r has row group + 8 (r % 2), columns 4 per (r // 2) + per t and on.
- B [8, K], its columns as rows: register r has row group, columns 4 per r + per t and on.
- C and D [16, N] of 32 bits: register r has row group + 8 (r // 2 % 2), column 8 (r // 4) + 2 t + r % 2.
- C and D [16, N] of 16 bits, two in a register: row group + 8 (r % 2), columns 8 (r // 2) + 2 t and on.

A warp of wgmma has 16 of the 64 rows of A, C and D, in the layouts of mma.sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tools.ptx_machine.numbers import BF16, EIGHT_BITS, Array, f2, f4, i1, u1, u2, u4

LANES = np.arange(32)
GROUP, THREAD = LANES // 4, LANES % 4
BITS = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
DTYPES: dict[str, Any] = {"bf16": BF16, "f16": f2, "s8": i1, "u8": u1} | {
    kind: dtype for kind, (dtype, _) in EIGHT_BITS.items()
}


def decode(raw: Array, kind: str) -> Array:
    """Numbers as float32, exactly.

    Args:
        raw: unsigned integers of any width, contiguous. The last axis grows by the numbers in each.
    """
    if kind in DTYPES:
        return raw.view(DTYPES[kind]).astype(f4)
    if kind == "tf32":  # the hardware does not read the lower 13 bits
        return (raw.view(u4) & u4(0xFFFFE000)).view(f4)
    if kind not in ("s4", "u4"):
        raise NotImplementedError(f"matrices of .{kind}")
    byte = raw.view(u1)
    out = np.stack([byte & u1(15), byte >> u1(4)], -1).reshape(*byte.shape[:-1], -1).astype(f4)
    return np.where(out > 7, out - 16, out) if kind == "s4" else out


@cache
def operand_places(count: int, per: int, rows: int) -> tuple[Array, Array]:
    """Row and column [count, 32, per] of each number in the registers of A (rows: 16) or B (rows: 8)."""
    r = np.arange(count)[:, None, None]
    half = r % 2 if rows == 16 else 0
    chunk = r // 2 if rows == 16 else r
    shape = (count, 32, per)
    row = np.broadcast_to(GROUP[:, None] + 8 * half, shape)
    column = np.broadcast_to(4 * per * chunk + per * THREAD[:, None] + np.arange(per), shape)
    return row, column


@cache
def result_places(count: int, packed: bool = False) -> tuple[Array, Array]:
    """Row and column of each number of C or D: [count, 32], or [count, 32, 2] of numbers of 16 bits."""
    r = np.arange(count)[:, None]
    if packed:
        shape = (count, 32, 2)
        row = (GROUP + 8 * (r % 2))[..., None]
        column = (8 * (r // 2) + 2 * THREAD)[..., None] + np.arange(2)
        return np.broadcast_to(row, shape), np.broadcast_to(column, shape)
    return GROUP + 8 * (r // 2 % 2), 8 * (r // 4) + r % 2 + 2 * THREAD


def operand(registers: Sequence[Array], kind: str, rows: int) -> Array:
    """A [16, K], or B [8, K] with its columns as rows, from registers of 32 lanes. float32."""
    per = 32 // BITS[kind]
    values = decode(np.stack(registers)[..., None], kind)  # [count, 32, per]
    row, column = operand_places(len(registers), per, rows)
    out = np.empty((rows, values.size // rows), f4)
    out[row, column] = values
    return out


def results(matrix: Array, packed: bool = False) -> Array:
    """Registers [count, 32] of C or D [16, N]: of float32 or int32, or of float16 if packed."""
    if not packed:
        row, column = result_places(matrix.shape[1] // 2)
        return np.ascontiguousarray(matrix[row, column]).view(u4)
    row, column = result_places(matrix.shape[1] // 4, True)
    return np.ascontiguousarray(matrix[row, column]).view(u4)[..., 0]


def accumulators(registers: Sequence[Array], dtype: Any, packed: bool = False) -> Array:
    """C [16, N] of float32 or int32, or of float16 if packed, from its registers."""
    raw = np.stack(registers)
    row, column = result_places(len(registers), packed)
    values = raw[..., None].view(dtype) if packed else raw.view(dtype)
    out = np.empty((16, values.size // 16), dtype)
    out[row, column] = values
    return out


def loaded(rows: Array, transposed: bool) -> Array:
    """Registers [n, 32] that ldmatrix fills.

    Args:
        rows: [8 n, 4] uint32: the 16 bytes at the address of lane 8 i + j are row j of matrix i.
    """
    matrices = np.ascontiguousarray(rows).view(u2).reshape(-1, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(u4).reshape(-1, 32)


def stored(registers: Sequence[Array], transposed: bool) -> Array:
    """Rows [8 n, 4] that stmatrix writes: the inverse of `loaded`."""
    matrices = np.stack(registers).reshape(-1, 8, 4).view(u2)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).view(u4).reshape(-1, 4)
