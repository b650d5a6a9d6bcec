"""Products with four-bit weights, as a Pallas Mosaic GPU kernel for Hopper (sm_90a): each row by the matrix
of its group.

A dense product has a single group. A thread block computes a block of rows and 64 outputs per compute
warpgroup. Each warpgroup loads packed words and unpacks them in its registers as an operand of the tensor
cores (`int4_registers.py`). So weights are read once per block of rows and never stored unpacked. Weights are
multiplied by their scales first, so that one sum takes all inputs: scales and weights are rounded to x's
dtype, as in a model with such weights, but the weights of MXFP4 stay exact.

Words and inputs are copied tile by tile or, in blocks of few rows, in pairs of tiles, with their scales.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, tiled
from pallas_kernels.mosaic.refs import body
from pallas_kernels.products.groups import BLOCK, GRID, Groups, input_splits, one_group
from pallas_kernels.products.hopper.int4_kernel import Form, Inputs, Outputs, Scratch, run
from pallas_kernels.quantization.int4 import SCALES, TILE, WORDS, Int4

STAGES = 6  # maximum in flight
TWO_BLOCKS = 16  # with at most this many rows per block, a multiprocessor holds two blocks
# bytes of shared memory per block if a multiprocessor holds two, and if it holds one
SHARED = 110 << 10, 224 << 10
LEAST_TILES = 4  # minimum tiles per block if several blocks share a product's inputs


def int4_product(
    x: jax.Array, weight: Int4, *, dtype: jax.typing.DTypeLike | None = None, cores: int
) -> jax.Array:
    """x [rows, in] @ weight [out, in].T.

    Args:
        x: bfloat16 or float16, with the weight's transform applied.
        weight: in one part; out is a multiple of 64. Scales are at most 2^62 in magnitude, of e2m1 2^64, and
            with float16 below 16; larger ones give NaN. e2m1 has no offsets.
        dtype: dtype of the result; None: x's.
        cores: multiprocessors of the device. With few outputs, several thread blocks share the inputs, and
            XLA adds their partial sums.

    Returns:
        [rows, out].
    """
    rows = len(x)
    groups, block = one_group(rows)
    splits = splits_of(rows, weight.shape[0], weight.shape[1], cores)
    matrices, partial_dtype = (
        weight.map(lambda array: array[None]),
        jnp.float32 if splits > 1 else dtype or x.dtype,
    )
    y = _products(jnp.pad(x, ((0, -rows % block), (0, 0))), matrices, groups, block, splits, partial_dtype)
    y = y[0] if splits == 1 else y.sum(0).astype(dtype or x.dtype)
    return y[:rows]


def splits_of(rows: int, outs: int, size: int, cores: int) -> int:
    """Thread blocks that share a product's inputs; see `input_splits`."""
    blocks = -(-rows // BLOCK[1]) * outs // (ROWS * _warpgroups(outs))
    return input_splits(blocks, rows, size, 4, TILE * LEAST_TILES, cores)


def grouped_int4_product(x: jax.Array, weight: Int4, groups: Groups) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: bfloat16 or float16 [places, in], in the order of `groups`, with the weight's transform applied.
        weight: [groups, out, in], otherwise as in `int4_product`.
        groups: from `groups.grouped`.

    Returns:
        [places, out], in x's dtype; undefined in places without a row.
    """
    return _products(x, weight, groups, groups.block, 1, x.dtype)[0]


def _products(
    x: jax.Array, weight: Int4, groups: Groups, block: int, splits: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The partial sums of each split of the inputs: [splits, places, out]."""
    _, out, size = weight.shape
    offsets, warpgroups = weight.offset is not None, _warpgroups(out)
    outs, inputs = warpgroups * ROWS, TILE * (2 if block <= COLUMNS else 1)  # of a stage
    scales = max(SCALES, inputs // weight.group)  # that come with a stage
    x = jnp.pad(x, ((0, 0), (0, -size % inputs)))
    count = x.shape[1] // inputs
    each = -(-count // splits)
    splits = -(-count // each)
    # bytes
    by_stage = outs * (inputs // 2 + 4 * scales * (1 + offsets)) + block * inputs * x.dtype.itemsize
    shared = SHARED[block > TWO_BLOCKS] - outs * block * jnp.dtype(dtype).itemsize
    stages = min(STAGES, shared // by_stage)
    line = plgpu.SMEM((stages, outs, scales), jnp.float32)
    scratch = Scratch(
        free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        full=plgpu.Barrier(num_arrivals=3 + offsets, num_barriers=stages),
        offset=line if offsets else None,
        out=plgpu.SMEM((warpgroups, block, ROWS), jnp.dtype(dtype)),
        scale=line,
        w=tiled((stages, outs, inputs // TILE * WORDS), jnp.dtype("int32"), WORDS),
        x=tiled((stages, block, inputs), x.dtype, COLUMNS),
    )
    y: jax.Array = plgpu.kernel(
        body(run, Outputs, Form(each, weight.group, weight.kind)),
        out_type=jax.ShapeDtypeStruct((splits, -(-len(x) // GRID) * GRID, out), dtype),
        scratch_types=[scratch],
        # blocks of a group run together, while its matrix is in the L2 cache
        grid=(len(groups.group), out // outs, splits),
        grid_names=("block", "part", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="int4_product",
    )(Inputs(x, weight.values, weight.scale, groups.group, groups.start, groups.length, weight.offset))
    return y


def _warpgroups(out: int) -> int:
    """Compute warpgroups of a thread block."""
    return 2 if out % (2 * ROWS) == 0 else 1
