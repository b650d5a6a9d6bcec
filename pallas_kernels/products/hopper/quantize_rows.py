"""Residual sum and norm, or gated activation, and quantization of rows, as one Pallas Mosaic GPU kernel for
Hopper.

A thread block processes one row. It loads the row's numbers in chunks, keeps them in shared memory, and
passes over them up to three times: sum, norm, rounding. XLA would need a kernel for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling

from pallas_kernels.mosaic.versions import store
from pallas_kernels.quantization.quantized import GROUP, LARGEST, SMALLEST

THREADS = 128  # of a block; the size of a row is a multiple
CHUNK = 8 * THREADS  # numbers that a block processes at a time, at most
AHEAD = 4  # chunks that are loaded together
WARPS = THREADS // 32


# as in `activations.ACTIVATIONS`, in float32
GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "relu": lambda x: jnp.maximum(x, 0.0),
}


class Norm(NamedTuple):
    """A root mean square norm, as `qkv.rms_norm`."""

    weight: jax.Array
    eps: float
    offset: float


def quantize_rows(
    x: jax.Array,
    kind: str,
    *,
    add: jax.Array | None = None,
    norm: Norm | None = None,
    gate: str | None = None,
    places: int | None = None,
    by_group: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Quantizes rows as `quantized.quantize` does, after a sum and a norm.

    Args:
        x: [rows, size], bfloat16, float16 or float32; size is a multiple of 128.
        kind: int8 or float8_e4m3fn.
        add: added to x, of the same shape and dtype. The sum is rounded to this dtype.
        norm: applied to the sum; its result is rounded to x's dtype too.
        gate: the name of an activation in GATES. x is bfloat16 [rows, 2 * size]; each gate is next to its
            factor, as for `activations.gated`.
        places: number of rows of the result; None: as x. The others are undefined.
        by_group: whether each 128 numbers of a row have a scale.
        interpret: as in `plgpu.kernel`.

    Returns:
        Numbers [places, size], their scales float32 [places] or, by group, [size / 128, places], and x + add,
        or None without `add`.
    """
    if gate is not None:
        x = lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.uint32)  # no kernel: the bytes stay
    rows, size = x.shape
    dtype = jnp.bfloat16 if gate is not None else x.dtype
    places = places or rows
    apart = (size // GROUP, GROUP) if by_group else (size,)
    out = [
        jax.ShapeDtypeStruct((places, *apart), jnp.dtype(kind)),
        jax.ShapeDtypeStruct((*apart[:-1], places), jnp.float32),
    ]
    values, scale, *total = plgpu.kernel(
        partial(_kernel, norm=None if norm is None else (norm.eps, norm.offset), gate=gate),
        out_type=[*out, *([] if add is None else [jax.ShapeDtypeStruct(x.shape, x.dtype)])],
        scratch_types={"smem": plgpu.SMEM((size,), dtype)},
        grid=(rows,),
        grid_names=("row",),
        kernel_name="quantize_rows",
        interpret=interpret,
    )(x, add, None if norm is None else norm.weight)
    return values.reshape(places, size), scale, *(total or [None])


def _kernel(
    x_ref: Any,
    add_ref: Any,
    weight_ref: Any,
    values_ref: Any,
    scale_ref: Any,
    *sum_ref: Any,
    smem: Any,
    norm: Any,
    gate: str | None,
) -> None:
    row, (size,) = lax.axis_index("row"), smem.shape
    kind, dtype, chunk = values_ref.dtype, smem.dtype, math.gcd(size, CHUNK)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=chunk // THREADS)
    chunks = [pl.ds(at, chunk) for at in range(0, size, chunk)]

    def zeros() -> jax.Array:
        filled: jax.Array = plgpu.layout_cast(jnp.zeros((chunk,), jnp.float32), layout)
        return filled

    def load(ref: Any, place: Any) -> jax.Array:
        loaded: jax.Array = plgpu.load(ref.at[place], layout=layout, optimized=False)
        return loaded

    squares, largest = zeros(), zeros()
    for first in range(0, len(chunks), AHEAD):
        some = chunks[first : first + AHEAD]
        loaded = [[load(ref.at[row], place) for place in some] for ref in (x_ref, add_ref) if ref is not None]
        for place, *parts in zip(some, *loaded, strict=True):
            y = parts[0] if gate is None else _gated(parts[0], gate).astype(dtype)
            if sum_ref:
                y = (y.astype(jnp.float32) + parts[1].astype(jnp.float32)).astype(dtype)
                sum_ref[0][row, place] = y
            smem[place] = y
            wide = y.astype(jnp.float32)
            squares, largest = squares + wide * wide, jnp.maximum(largest, jnp.abs(wide))
    if norm is not None:
        eps, offset = norm
        factor, largest = lax.rsqrt(jnp.sum(squares) / size + eps), zeros()
        for place in chunks:
            y = load(smem, place).astype(jnp.float32) * factor
            y = (y * (load(weight_ref, place).astype(jnp.float32) + offset)).astype(dtype)
            smem[place] = y
            largest = jnp.maximum(largest, jnp.abs(y.astype(jnp.float32)))

    def scale_of(largest: jax.Array) -> jax.Array:
        return jnp.maximum(largest, SMALLEST) / LARGEST[jnp.dtype(kind)]

    def rounded(values: jax.Array) -> jax.Array:
        return (jnp.round(values) if kind == jnp.int8 else values).astype(kind)

    if len(values_ref.shape) == 2:
        scale = scale_of(jnp.max(largest))
        scale_ref[row] = scale
        for place in chunks:
            values_ref[row, place] = rounded(load(smem, place).astype(jnp.float32) / scale)
        return
    plgpu.commit_smem()  # other threads read what a thread has written
    groups = size // GROUP
    count, by_warp = math.gcd(groups, WARPS), _groups_by_warp(groups)
    for at in range(0, groups, count):
        part = pl.ds(at, count)
        y = plgpu.load(smem.reshape(groups, GROUP).at[part], layout=by_warp).astype(jnp.float32)
        scales = scale_of(jnp.abs(y).max(axis=1))
        store(scale_ref.at[part, row], scales)
        store(values_ref.at[row, part], rounded(y / lax.broadcast_in_dim(scales, y.shape, [0])))


def _groups_by_warp(groups: int) -> Any:
    """Layout of [gcd(groups, WARPS), GROUP]: each warp has a row or, of fewer rows, an equal part."""
    layouts = {
        4: (Tiling(((4, GROUP), (4,))), (-3,)),
        2: (Tiling(((2, GROUP), (64,), (2,))), (-4, -3)),
        1: (Tiling(((1, GROUP), (32,), (1,))), (-3,)),
    }
    tiling, warps = layouts[math.gcd(groups, WARPS)]
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)


def _gated(words: jax.Array, activation: str) -> jax.Array:
    """Gate and factor are the lower and the upper half of a word."""
    gate, up = (
        lax.bitcast_convert_type(half, jnp.float32) for half in (words << 16, words & jnp.uint32(0xFFFF0000))
    )
    result: jax.Array = GATES[activation](gate) * up
    return result
