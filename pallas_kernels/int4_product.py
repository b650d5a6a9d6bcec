"""Products with four-bit weights, as a Pallas Mosaic GPU kernel for Hopper (sm_90a): each row by the matrix
of its group.

A dense product has a single group. A thread block computes a block of rows and 64 outputs per compute
warpgroup. Each warpgroup loads packed words and unpacks them in its registers as an operand of the tensor
cores (`int4_registers.py`). So weights are read once per block of rows and never stored unpacked. Unpacked
numbers are exact. The kernel multiplies the sum over inputs with a common scale by that scale in float32, and
the offset by the sum of these inputs, so no weight is rounded. In blocks of few rows, the tensor cores
compute these sums, too, as a product with ones. They would take as long as the product itself, so for more
rows XLA computes them.

Words and inputs are copied tile by tile. Scales, offsets and XLA's sums of inputs are copied in chunks of
four groups, which may span several tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.groups import BLOCK, GRID, Groups, block_rows, one_group
from pallas_kernels.hopper import COLUMNS, ROWS, store_transposed, tiled
from pallas_kernels.int4 import SCALES, TILE, WORDS, Int4
from pallas_kernels.int4_registers import SCALE_LAYOUT, STEP, WORD_LAYOUT, columns_of, factor, numbers

STAGES = 6  # maximum tiles in flight
TWO_BLOCKS = 16  # with at most this many rows per block, a multiprocessor holds two blocks
# bytes of shared memory per block if a multiprocessor holds two, and if it holds one
SHARED = 110 << 10, 224 << 10
LEAST_TILES = 4  # minimum tiles per block if several blocks share a product's inputs
REGISTERS = 216, 72  # per compute thread and per memory thread, in blocks of 64 rows or more


def int4_product(
    x: jax.Array,
    weight: Int4,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    cores: int,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [rows, in] @ weight [out, in].T.

    Args:
        x: bfloat16 or float16, with the weight's transform applied.
        weight: in one part; out is a multiple of 64.
        dtype: dtype of the result; None: x's.
        cores: multiprocessors of the device. With few outputs, several thread blocks share the inputs, and
            XLA adds their partial sums.
        operand_in_registers, interpret: as in `grouped_int4_product`.

    Returns:
        [rows, out].
    """
    rows = len(x)
    groups, block = one_group(rows)
    ways: dict[str, Any] = {"operand_in_registers": operand_in_registers, "interpret": interpret}
    splits = splits_of(rows, weight.shape[0], weight.shape[1], cores)
    matrices, partial_dtype = (
        weight.map(lambda array: array[None]),
        jnp.float32 if splits > 1 else dtype or x.dtype,
    )
    y = _products(
        jnp.pad(x, ((0, -rows % block), (0, 0))), matrices, groups, block, splits, partial_dtype, **ways
    )
    y = y[0] if splits == 1 else y.sum(0).astype(dtype or x.dtype)
    return y[:rows]


def splits_of(rows: int, outs: int, size: int, cores: int) -> int:
    """Thread blocks that share a product's inputs: enough for two blocks on each multiprocessor, unless
    partial sums cost too much.
    """
    blocks = -(-rows // BLOCK[1]) * outs // (ROWS * _warpgroups(outs))
    # writing and reading partial sums moves at most half the weight's bytes
    worth = size // (32 * max(rows, BLOCK[0]))
    return max(1, min(2 * cores // blocks, worth, size // (TILE * LEAST_TILES)))


def grouped_int4_product(
    x: jax.Array,
    weight: Int4,
    groups: Groups,
    *,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: bfloat16 or float16 [places, in], in the order of `groups`, with the weight's transform applied.
        weight: [groups, out, in] in one part; out is a multiple of 64.
        groups: from `groups.grouped`.
        operand_in_registers: the tensor cores read unpacked weights from registers. False, for Pallas's
            interpreter only: from shared memory.
        interpret: as in `plgpu.kernel`.

    Returns:
        [places, out], in x's dtype; undefined in places without a row.
    """
    block = block_rows(len(groups.place), weight.shape[0])
    ways: dict[str, Any] = {"operand_in_registers": operand_in_registers, "interpret": interpret}
    return _products(x, weight, groups, block, 1, x.dtype, **ways)[0]


def _products(
    x: jax.Array, weight: Int4, groups: Groups, block: int, splits: int, dtype: jax.typing.DTypeLike, *,
    operand_in_registers: bool, interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:  # fmt: skip
    """The partial sums of each split of the inputs: [splits, places, out]."""
    _, out, size = weight.shape
    # tiles per chunk; a chunk has SCALES groups
    warpgroups, chunk = _warpgroups(out), SCALES * weight.group // TILE
    outs, chunks = warpgroups * ROWS, -(-size // (chunk * TILE))
    x = jnp.pad(x, ((0, 0), (0, chunks * chunk * TILE - size)))
    each = -(-chunks // splits)
    splits = -(-chunks // each)
    offsets, given_sums = weight.offset is not None, weight.offset is not None and block > TWO_BLOCKS
    by_chunk = 4 * SCALES * (outs + offsets * outs + given_sums * block)  # bytes of scales, offsets and sums
    by_tile = outs * WORDS * 4 + block * TILE * x.dtype.itemsize + by_chunk // chunk
    shared = SHARED[block > TWO_BLOCKS] - by_chunk - outs * block * jnp.dtype(dtype).itemsize
    stages = min(STAGES, shared // by_tile)
    places = stages // chunk + 1  # chunks in flight
    line = partial(plgpu.SMEM, dtype=jnp.float32)
    scratch = {
        "x_smem": tiled((stages, block, TILE), x.dtype, min(weight.group, COLUMNS)),
        "w_smem": tiled((stages, outs, WORDS), jnp.dtype("int32"), WORDS),
        "scale_smem": line((places, outs, SCALES)),
        "offset_smem": line((places, outs, SCALES)) if offsets else None,
        "sums_smem": line((places, SCALES, block)) if given_sums else None,
        "a_smem": (
            None
            if operand_in_registers
            else tiled((warpgroups, ROWS, TILE), x.dtype, min(weight.group, COLUMNS))
        ),
        "ones_smem": (
            None
            if operand_in_registers
            else tiled((warpgroups, ROWS, COLUMNS), x.dtype, min(weight.group, COLUMNS))
        ),
        "out_smem": plgpu.SMEM((warpgroups, block, ROWS), jnp.dtype(dtype)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        "scale_full": plgpu.Barrier(num_arrivals=1 + offsets + given_sums, num_barriers=places),
        "scale_free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=places),
    }
    more = [weight.offset] if offsets else []
    if given_sums:
        more.append(x.astype(jnp.float32).reshape(len(x), -1, weight.group).sum(-1).T)  # [groups, places]
    y: jax.Array = plgpu.kernel(
        partial(_kernel, each=each, group_size=weight.group, kind=weight.kind),
        out_type=jax.ShapeDtypeStruct((splits, -(-len(x) // GRID) * GRID, out), dtype),
        scratch_types={name: what for name, what in scratch.items() if what is not None},
        # blocks of a group run together, while its matrix is in the L2 cache
        grid=(len(groups.group), out // outs, splits),
        grid_names=("block", "part", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="int4_product",
        interpret=interpret,
    )(x, weight.values, weight.scale, groups.group, groups.start, groups.length, *more)
    return y


def _kernel(
    x_ref: Any, w_ref: Any, scale_ref: Any, group_ref: Any, start_ref: Any, length_ref: Any, *refs: Any,
    x_smem: Any, w_smem: Any, scale_smem: Any, offset_smem: Any = None, sums_smem: Any = None,
    a_smem: Any = None, ones_smem: Any = None,
    out_smem: Any, full: Any, free: Any, scale_full: Any, scale_free: Any, each: int, group_size: int,
    kind: str,
) -> None:  # fmt: skip
    *more_refs, out_ref = refs  # offsets and sums
    stages, block, _ = x_smem.shape
    warpgroups, places = out_smem.shape[0], scale_smem.shape[0]
    chunk, in_tile = SCALES * group_size // TILE, TILE // group_size  # tiles per chunk, groups per tile
    # groups at once, inputs per operand
    at_once, piece = max(1, min(in_tile, 2 if block < COLUMNS else 1)), min(group_size, COLUMNS)
    index, part, split, warpgroup = (lax.axis_index(name) for name in ("block", "part", "split", "warpgroup"))
    group, start, length = group_ref[index], start_ref[index], length_ref[index]
    first_out, first = part * warpgroups * ROWS, split * each
    chunks = jnp.minimum(each, x_ref.shape[1] // (chunk * TILE) - first)
    own = pl.ds(warpgroup * ROWS, ROWS)

    def compute() -> None:
        if block >= COLUMNS and warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        in_registers = a_smem is None
        ones: Any = jnp.ones((ROWS, piece), x_smem.dtype)
        if in_registers:
            ones = plgpu.layout_cast(ones, plgpu.Layout.WGMMA)
        else:
            ones_smem[warpgroup, :, :piece] = ones
            plgpu.commit_smem()
            ones = ones_smem.at[warpgroup, :, pl.ds(0, piece)]

        def operand(words: Any, first: int) -> Any:
            """Unpacked weights of a piece of a tile, as an operand of the tensor cores."""
            mine = numbers(
                words, range(first // STEP, (first + piece) // STEP), kind, x_smem.dtype, in_registers
            )
            if in_registers:
                return mine
            place = a_smem.at[warpgroup, :, pl.ds(first, piece)]
            place[...] = mine
            plgpu.commit_smem()
            return place

        def products_of(slot: Any, some: Sequence[int], operand: Callable[[int], Any]) -> list[jax.Array]:
            """Products of some of a tile's groups with operands for their inputs, [64, block] each."""

            def multiply(*sums: Any) -> list[jax.Array]:
                for group, acc in zip(some, sums, strict=True):
                    for first in range(group * group_size, (group + 1) * group_size, piece):
                        columns = x_smem.at[slot, :, pl.ds(first, piece)]
                        plgpu.wgmma(acc, operand(first), columns.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return [acc[...] for acc in sums]

            found: list[jax.Array] = pl.run_scoped(
                multiply, *[plgpu.WGMMAAccumulatorRef((ROWS, block), jnp.float32) for _ in some]
            )
            return found

        def of_outputs(ref: Any, place: Any, inside: Any, group: int) -> jax.Array:
            """Scales or offsets of a group in tile `inside` of the chunk, broadcast to [64, block]."""
            lines = columns_of(
                plgpu.load(ref.at[place, own], layout=SCALE_LAYOUT, optimized=False), in_registers
            )[group::in_tile]
            line = lines[0]
            for tile in range(1, chunk):
                line = jnp.where(jnp.broadcast_to(inside == tile, line.shape), lines[tile], line)
            return lax.broadcast_in_dim(line, (ROWS, block), [0])

        def sums_of(slot: Any, place: Any, inside: Any, group: int) -> jax.Array:
            """Sums of the rows' inputs in one of a tile's groups, the same for all outputs, [64, block]."""
            if sums_smem is None:
                return products_of(slot, [group], lambda first: ones)[0]
            line = plgpu.load(
                sums_smem.at[place, inside * in_tile + group], layout=plgpu.Layout.WGMMA.reduce(0)
            )
            return lax.broadcast_in_dim(line, (ROWS, block), [1])

        def fold(step: jax.Array, total: jax.Array) -> jax.Array:
            slot, place, inside = (
                lax.rem(step, stages),
                lax.rem(lax.div(step, chunk), places),
                lax.rem(step, chunk),
            )
            plgpu.barrier_wait(full.at[slot])
            words = plgpu.load(w_smem.at[slot, own], layout=WORD_LAYOUT)
            pl.when(inside == 0)(partial(plgpu.barrier_wait, scale_full.at[place]))
            for begin in range(0, in_tile, at_once):
                some = range(begin, begin + at_once)
                for group, y in zip(some, products_of(slot, some, partial(operand, words)), strict=True):
                    total += y * (of_outputs(scale_smem, place, inside, group) * factor(kind))
                    if offset_smem is not None:
                        total += of_outputs(offset_smem, place, inside, group) * sums_of(
                            slot, place, inside, group
                        )
            # on a GPU the barrier orders these loads before the next copy; the interpreter needs a fence
            if not in_registers:
                plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[slot])
            pl.when(inside == chunk - 1)(partial(plgpu.barrier_arrive, scale_free.at[place]))
            return total

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), plgpu.Layout.WGMMA)
        y = lax.fori_loop(0, chunks * chunk, fold, zeros)
        mine = out_smem.at[warpgroup]
        store_transposed(mine, y.astype(out_smem.dtype))
        plgpu.commit_smem()
        outputs = pl.ds(first_out + warpgroup * ROWS, ROWS)
        at: Any = 0
        size = block // GRID
        while size:  # the length of a copy must be static
            taken = length & size
            from_smem, to = (
                mine.at[pl.ds(at * GRID, size * GRID)],
                out_ref.at[split, pl.ds((start + at) * GRID, size * GRID), outputs],
            )
            pl.when(taken > 0)(partial(plgpu.copy_smem_to_gmem, from_smem, to))
            at, size = at + taken, size // 2
        plgpu.wait_smem_to_gmem(0)

    def memory() -> None:
        if block >= COLUMNS and warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        outs, rows = pl.ds(first_out, warpgroups * ROWS), pl.ds(start * GRID, block)

        def scales(at: Any) -> None:
            place, columns = lax.rem(at, places), pl.ds((first + at) * SCALES, SCALES)
            pl.when(at >= places)(partial(plgpu.barrier_wait, scale_free.at[place]))
            plgpu.copy_gmem_to_smem(
                scale_ref.at[group, outs, columns], scale_smem.at[place], scale_full.at[place]
            )
            if offset_smem is not None:
                plgpu.copy_gmem_to_smem(
                    more_refs[0].at[group, outs, columns], offset_smem.at[place], scale_full.at[place]
                )
            if sums_smem is not None:
                plgpu.copy_gmem_to_smem(
                    more_refs[1].at[columns, rows], sums_smem.at[place], scale_full.at[place]
                )

        @pl.loop(0, chunks * chunk)
        def _(i: jax.Array) -> None:
            slot, tile = lax.rem(i, stages), first * chunk + i
            stored = jnp.minimum(tile, w_ref.shape[-1] // WORDS - 1)  # inputs beyond the last tile are zeros
            pl.when(lax.rem(i, chunk) == 0)(partial(scales, lax.div(i, chunk)))
            pl.when(i >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
            plgpu.copy_gmem_to_smem(
                w_ref.at[group, outs, pl.ds(stored * WORDS, WORDS)], w_smem.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(x_ref.at[rows, pl.ds(tile * TILE, TILE)], x_smem.at[slot], full.at[slot])

        # Wait for each slot's last release: every barrier phase must be observed.
        pl.loop(0, jnp.minimum(chunks * chunk, stages))(lambda slot: plgpu.barrier_wait(free.at[slot]))
        pl.loop(0, jnp.minimum(chunks, places))(lambda place: plgpu.barrier_wait(scale_free.at[place]))

    pl.when((length > 0) & (warpgroup < warpgroups))(compute)
    pl.when((length > 0) & (warpgroup == warpgroups))(memory)


def _warpgroups(out: int) -> int:
    """Compute warpgroups of a thread block."""
    return 2 if out % (2 * ROWS) == 0 else 1
