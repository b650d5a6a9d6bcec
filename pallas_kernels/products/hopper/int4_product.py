"""Products with four-bit weights, as a Pallas Mosaic GPU kernel for Hopper (sm_90a): each row by the matrix
of its group.

A dense product has a single group. A thread block computes a block of rows and 64 outputs per compute
warpgroup. Each warpgroup loads packed words and unpacks them in its registers as an operand of the tensor
cores (`int4_registers.py`). So weights are read once per block of rows and never stored unpacked. For
bfloat16, weights are multiplied by their scales first, so that one sum takes all inputs: scales and weights
are rounded to bfloat16, as in a model whose weights are bfloat16; those of MXFP4 stay exact.

For float16, whose range is too small for that, unpacked numbers are exact. The kernel multiplies the sum over
inputs with a common scale by that scale in float32, and the offset by the sum of these inputs. In blocks of
few rows, the tensor cores compute these sums, too, as a product with ones. They would take as long as the
product itself, so for more rows XLA computes them.

Words and inputs are copied tile by tile or, for bfloat16 in blocks of few rows, in pairs of tiles. For
bfloat16, scales come with them; for float16, scales and sums of inputs are copied in chunks of four groups,
which may span several tiles.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, tiled
from pallas_kernels.mosaic.refs import body
from pallas_kernels.products.groups import BLOCK, GRID, Groups, input_splits, one_group
from pallas_kernels.products.hopper.int4_kernel import Form, Inputs, Outputs, Scratch, run
from pallas_kernels.quantization.int4 import SCALES, TILE, WORDS, Int4

STAGES = 6  # maximum tiles in flight
TWO_BLOCKS = 16  # with at most this many rows per block, a multiprocessor holds two blocks
# bytes of shared memory per block if a multiprocessor holds two, and if it holds one
SHARED = 110 << 10, 224 << 10
LEAST_TILES = 4  # minimum tiles per block if several blocks share a product's inputs


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
        weight: in one part; out is a multiple of 64. Scales are at most 2^62 in magnitude; those of e2m1 in
            groups of 32 without offsets are powers of two, as MXFP4's are.
        dtype: dtype of the result; None: x's.
        cores: multiprocessors of the device. With few outputs, several thread blocks share the inputs, and
            XLA adds their partial sums.
        operand_in_registers, interpret: as in `grouped_int4_product`.

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
    x, options = jnp.pad(x, ((0, -rows % block), (0, 0))), (operand_in_registers, interpret)
    y = _products(x, matrices, groups, block, splits, partial_dtype, *options)
    y = y[0] if splits == 1 else y.sum(0).astype(dtype or x.dtype)
    return y[:rows]


def splits_of(rows: int, outs: int, size: int, cores: int) -> int:
    """Thread blocks that share a product's inputs; see `input_splits`."""
    blocks = -(-rows // BLOCK[1]) * outs // (ROWS * _warpgroups(outs))
    return input_splits(blocks, rows, size, 4, TILE * LEAST_TILES, cores)


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
        weight: [groups, out, in] in one part; out is a multiple of 64. Scales: see `int4_product`.
        groups: from `groups.grouped`.
        operand_in_registers: the tensor cores read unpacked weights from registers. False, for Pallas's
            interpreter only: from shared memory.
        interpret: as in `plgpu.kernel`.

    Returns:
        [places, out], in x's dtype; undefined in places without a row.
    """
    return _products(x, weight, groups, groups.block, 1, x.dtype, operand_in_registers, interpret)[0]


def _products(
    x: jax.Array,
    weight: Int4,
    groups: Groups,
    block: int,
    splits: int,
    dtype: jax.typing.DTypeLike,
    operand_in_registers: bool,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """The partial sums of each split of the inputs: [splits, places, out]."""
    _, out, size = weight.shape
    offsets = weight.offset is not None
    scaled = weight.kind == "int4" or (weight.group, offsets) == (32, False)
    # Pallas interprets neither this nor subnormal numbers
    scaled &= x.dtype == jnp.bfloat16 and operand_in_registers
    tiles = 2 if scaled and block <= COLUMNS else 1  # per stage
    # tiles per chunk; a chunk has SCALES groups, or is a stage
    warpgroups, chunk = _warpgroups(out), tiles if scaled else SCALES * weight.group // TILE
    columns = max(SCALES, chunk * TILE // weight.group)  # of scales that are copied together
    outs, chunks = warpgroups * ROWS, -(-size // (chunk * TILE))
    x = jnp.pad(x, ((0, 0), (0, chunks * chunk * TILE - size)))
    each = -(-chunks // splits)
    splits = -(-chunks // each)
    given_sums = offsets and not scaled and block > TWO_BLOCKS
    # bytes of scales, offsets and sums
    by_chunk = 4 * (columns * outs * (1 + offsets) + SCALES * given_sums * block)
    by_stage = tiles * (outs * WORDS * 4 + block * TILE * x.dtype.itemsize) + by_chunk // (chunk // tiles)
    shared = SHARED[block > TWO_BLOCKS] - by_chunk - outs * block * jnp.dtype(dtype).itemsize
    stages = min(STAGES, shared // by_stage)
    places = stages if scaled else stages // chunk + 1  # chunks in flight
    line = partial(plgpu.SMEM, dtype=jnp.float32)
    tile, ones = (warpgroups, ROWS, TILE), (warpgroups, ROWS, COLUMNS)
    operand = partial(tiled, dtype=x.dtype, columns=COLUMNS if scaled else min(weight.group, COLUMNS))
    scratch = Scratch(
        a=None if operand_in_registers else operand(tile),
        free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        full=plgpu.Barrier(num_arrivals=2 + scaled * (1 + offsets), num_barriers=stages),
        offset=line((places, outs, columns)) if offsets else None,
        ones=None if operand_in_registers else operand(ones),
        out=plgpu.SMEM((warpgroups, block, ROWS), jnp.dtype(dtype)),
        scale_free=None if scaled else plgpu.Barrier(num_arrivals=warpgroups, num_barriers=places),
        scale_full=None
        if scaled
        else plgpu.Barrier(num_arrivals=1 + offsets + given_sums, num_barriers=places),
        scale=line((places, outs, columns)),
        sums=line((places, SCALES, block)) if given_sums else None,
        w=tiled((stages, outs, WORDS * tiles), jnp.dtype("int32"), WORDS),
        x=operand((stages, block, TILE * tiles)),
    )
    sums = x.astype(jnp.float32).reshape(len(x), -1, weight.group).sum(-1).T if given_sums else None
    y: jax.Array = plgpu.kernel(
        body(run, Outputs, Form(each, chunk, weight.group, weight.kind, scaled)),
        out_type=jax.ShapeDtypeStruct((splits, -(-len(x) // GRID) * GRID, out), dtype),
        scratch_types=[scratch],
        # blocks of a group run together, while its matrix is in the L2 cache
        grid=(len(groups.group), out // outs, splits),
        grid_names=("block", "part", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="int4_product",
        interpret=interpret,
    )(Inputs(x, weight.values, weight.scale, groups.group, groups.start, groups.length, weight.offset, sums))
    return y


def _warpgroups(out: int) -> int:
    """Compute warpgroups of a thread block."""
    return 2 if out % (2 * ROWS) == 0 else 1
