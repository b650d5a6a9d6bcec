"""Products of each row with the matrix of its group on data-centre Blackwell (sm_100a), by Pallas's tcgen05.

The kernel is Hopper's (`hopper.grouped_product`), with the same copies, stages and scales, but its products
are in tensor memory: 128 outputs are the rows of the left side. A thread has one output, whose eight-bit
weights it loads 16 bytes at a time, converts to x's dtype and stores to tensor memory, while the tensor cores
multiply the previous stage. Weights in x's dtype are multiplied where they were copied to. If the inputs of a
stage have scales of their own, its sums alternate between two places: one is scaled and added while the other
is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.blackwell import LAYOUT, ROWS, store_transposed, together, wait_loaded, wait_stored
from pallas_kernels.mosaic.hopper import COLUMNS, tiled
from pallas_kernels.mosaic.words import of_word, pair_of, words_of
from pallas_kernels.products.groups import Groups, input_splits
from pallas_kernels.products.hopper.grouped_product import ALIGNED, LEAST_STEPS, Stages, kernel, launch

BYTES = 128  # of a row of weights in a stage
LEAST_ROWS = 16  # of a block: the least columns of a product with 128 outputs
# rows of a block of which a multiprocessor holds two: with one sum, and with sums of stages, which take more
# registers
TWO_BLOCKS = 64, 32
SHARED = 110 << 10, 220 << 10  # bytes of shared memory per block if it holds two, and if it holds one
STAGES = 6  # at most
PIECE = 16  # rows whose sums are scaled at a time
PLACES = 2  # for converted weights, and for the sums over a stage
WEIGHTS = plgpu.Layout.TCGEN05_TMEM_NATIVE(16)  # of eight bits: a row in a thread


class Tensor(NamedTuple):
    """Tensor memory, and barriers of products.

    Attributes:
        sums: [ROWS, block] or, of stages with scales of their own, [ROWS, PLACES * block].
        w: [ROWS, PLACES * columns], converted weights; None: x has their dtype.
        multiplied: barriers of PLACES, if stages have scales of their own; else None.
    """

    sums: Any
    w: Any
    multiplied: Any


def grouped_product(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    groups: Groups,
    *,
    block: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    x_scale: jax.Array | None = None,
    splits: int = 1,
) -> jax.Array:
    """Arguments and the result are those of `hopper.grouped_product.grouped_product`, but numbers of outputs
    and inputs are multiples of 128, and blocks, which `x_scale` fills if there is one group, have at least
    LEAST_ROWS.
    """
    result, block = jnp.dtype(dtype or x.dtype), max(block or groups.block, LEAST_ROWS)
    stored = result if splits == 1 else jnp.dtype(jnp.float32)
    columns, in_tile = BYTES // weight.dtype.itemsize, BYTES // x.dtype.itemsize
    x_scales = max(block, ALIGNED) if x_scale is not None and x_scale.ndim == 2 else 0  # of a stage
    short = bool(x_scales) or (scale is not None and scale.ndim == 3)
    by_stage = ROWS * BYTES + block * columns * x.dtype.itemsize + 4 * x_scales
    shared = SHARED[block > TWO_BLOCKS[short]] - block * ROWS * stored.itemsize
    stages = min(STAGES, shared // by_stage)
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    converts, converted = weight.dtype != x.dtype, plgpu.TMEM((ROWS, PLACES * columns), x.dtype, packed=True)
    barrier = partial(plgpu.Barrier, orders_tensor_core=True)
    tensor = Tensor(
        plgpu.TMEM((ROWS, (PLACES if short else 1) * block), sums),
        converted if converts else None,
        barrier(num_barriers=PLACES) if short else None,
    )
    scratch = {
        "x_smem": tiled((stages, block, columns), x.dtype, in_tile),
        "w_smem": tiled((stages, ROWS, columns), weight.dtype, in_tile if converts else columns),
        "scale_smem": plgpu.SMEM((stages, x_scales), jnp.float32) if x_scales else None,
        "out_smem": plgpu.SMEM((1, block, ROWS), stored),
        "full": plgpu.Barrier(num_arrivals=3 if x_scales else 2, num_barriers=stages),
        # by the product, and by the threads, whose loads its commit does not order
        "free": plgpu.Barrier(num_barriers=stages) if short else barrier(num_arrivals=2, num_barriers=stages),
        "tensor": tensor,
    }
    arrays = x, weight, groups.group, groups.start, groups.length, scale, x_scale
    by_tcgen05 = partial(kernel, total_of=_total, layout=LAYOUT, keep=store_transposed)
    return launch(by_tcgen05, arrays, scratch, 1, splits, result)


def splits_of(rows: int, weight: jax.Array, x: jax.typing.DTypeLike, cores: int) -> int:
    """As `hopper.grouped_product.splits_of`."""
    out, size = weight.shape
    blocks = -(-rows // 128) * (out // ROWS)
    limit = input_splits(blocks, rows, size, 8, BYTES * LEAST_STEPS, cores)
    return next(splits for splits in range(limit, 0, -1) if size // BYTES % splits == 0)


def _total(stages: Stages, tensor: Tensor) -> jax.Array:
    """The sum over all inputs, [ROWS, block]."""
    slots, block, columns = stages.x.shape

    def slot_of(i: jax.Array) -> jax.Array:
        return lax.rem(i, slots)

    def multiplied(i: jax.Array) -> Any:
        """The barrier of product i."""
        done = tensor.multiplied
        return stages.free.at[slot_of(i)] if done is None else done.at[lax.rem(i, PLACES)]

    def part(ref: Any, i: jax.Array, size: int) -> Any:
        return ref.at[:, pl.ds(lax.rem(i, PLACES) * size, size)]

    def start(i: jax.Array) -> None:
        """Converts the weights of stage i, and starts its product."""
        slot = slot_of(i)
        plgpu.barrier_wait(stages.full.at[slot])
        weights = stages.w.at[slot]
        if tensor.multiplied is None:
            pl.when(i >= PLACES)(lambda: plgpu.barrier_wait(multiplied(i - PLACES)))
        if tensor.w is not None:
            for at in range(0, columns, COLUMNS):  # with more at a time, two blocks need too many registers
                converted = _converted(weights.at[:, pl.ds(at, COLUMNS)], stages.x.dtype)
                place = pl.ds(lax.rem(i, PLACES) * columns + at, COLUMNS)
                plgpu.async_store_tmem(tensor.w.at[:, place], converted)
                together()
            weights = part(tensor.w, i, columns)
            wait_stored()
        sums = tensor.sums if tensor.multiplied is None else part(tensor.sums, i, block)
        rows = stages.x.at[slot].transpose((1, 0))
        add = i > 0 if tensor.multiplied is None else False
        if tensor.multiplied is None:
            together()
            plgpu.barrier_arrive(stages.free.at[slot])
        plgpu.tcgen05_mma(sums, weights, rows, multiplied(i), accumulate=add)

    def load(sums: Any) -> jax.Array:
        loaded: jax.Array = plgpu.async_load_tmem(sums, layout=LAYOUT)
        wait_loaded()
        return loaded.astype(jnp.float32)

    def fold(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        scales, added = stages.scales(i), []
        pl.when(i + 1 < stages.steps)(partial(start, i + 1))
        plgpu.barrier_wait(multiplied(i))
        for row, total in zip(range(0, block, PIECE), totals, strict=True):
            y = load(tensor.sums.at[:, pl.ds(lax.rem(i, PLACES) * block + row, PIECE)])
            added.append(total + stages.scaled(y, slot_of(i), scales, row))
        wait_stored()
        plgpu.barrier_arrive(stages.free.at[slot_of(i)])
        return added

    if tensor.multiplied is not None:
        start(jnp.int32(0))
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, PIECE), jnp.float32), LAYOUT)
        totals = lax.fori_loop(0, stages.steps, fold, [zeros] * (block // PIECE))
        for piece, total in enumerate(totals):
            plgpu.async_store_tmem(tensor.sums.at[:, pl.ds(piece * PIECE, PIECE)], total)
        wait_stored()
        return load(tensor.sums.at[:, pl.ds(0, block)])
    pl.loop(0, stages.steps)(start)
    for i in range(max(0, stages.steps - PLACES), stages.steps):
        plgpu.barrier_wait(multiplied(jnp.int32(i)))
    return load(tensor.sums)


def _converted(weights: Any, dtype: jnp.dtype[Any]) -> jax.Array:
    """Loads eight-bit weights [ROWS, n] and converts them to dtype, 16-bit floats."""
    loaded: jax.Array = plgpu.load(weights, layout=WEIGHTS, optimized=False)
    kind, returned = str(loaded.dtype), plgpu.ShapeDtypeStruct(loaded.shape, dtype, layout=LAYOUT)

    def convert(_: Any, x: Any) -> Any:
        words = (word for register in x.registers.flat for word in words_of(register))
        pairs = [pair_of(pair, dtype) for word in words for pair in of_word(word, kind, dtype)]
        layout = LAYOUT.to_mgpu()
        registers = np.array(pairs, object).reshape(layout.registers_shape(loaded.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    converted: jax.Array = plgpu.inline_mgpu(arg_types=(WEIGHTS,), return_type=returned)(convert)(loaded)
    return converted
