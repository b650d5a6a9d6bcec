"""Latent attention for one query per sequence (DeepSeek-V2, 2024), as a Pallas Mosaic GPU kernel for Hopper
(sm_90a).

All query heads read one cached vector per token, of `rank` channels and some that carry its position. The
vector is the key of every head, and its first `rank` channels are the value. So a thread block copies each
token once, for all of its heads, and the tensor cores' 64 rows hold up to 64 heads.

Persistent thread blocks, one per multiprocessor, process the items of a work list (`work_list.py`): tiles of
64 tokens of a (row, block of up to 64 heads) pair. The plan for rank 512 and 64 channels of position, in 16
bits:

- The result of 64 heads, 64 x 512 float32, is half of the register file. Two warpgroups keep half of its
columns
  each: 128 registers per thread. Scores and weights need about 50 more, so each thread has 224, and each of a
  third warpgroup, which copies, 56.
- Shared memory of 227 KiB holds the queries (72 KiB), two tiles (144 KiB) and the weights of a tile (8 KiB).
- The first warpgroup computes a tile's scores, folds them into an online softmax (Milakov and Gimelshein,
2018; Dao
  et al., 2022) and writes the weights to shared memory, with the factor that scales earlier sums. Then both
  multiply the weights by their half of the values. The second may still multiply while the first computes the
  next scores.
- A tile's products are as many as 68 of m64n64k16, or 1.2 us of a multiprocessor's tensor cores on an H200;
its softmax,
  which they wait for, takes about 0.3 us. Its copy takes 2.0 us, if all multiprocessors share the memory's
  bandwidth. So memory is the limit up to 64 heads per device. With more heads, each tile is copied once for
  every 64 heads, at best from the L2 cache, and the tensor cores are the limit. These are estimates.
- The item's results leave through the queries' shared memory, which is free after the last scores.

The memory warpgroup copies tiles by TMA, page by page. It clears the values of tokens beyond the sequence,
since 0 * NaN is NaN. The first warpgroup joins the parts of pairs that the work list splits, after the
block's own items (`join.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import targets
from pallas_kernels.attention.hopper.latent_kernel import HALVES, STAGES, Form, Inputs, Outputs, Scratch, run
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.work_list import TILE, WorkList, even_work
from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, tiled
from pallas_kernels.mosaic.refs import body


def latent_attention_decode(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    rank: int,
    work: WorkList | None = None,
    device: jax.Device | None = None,
    in_place: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Attends from one query per sequence to all tokens of the sequence.

    `LATENT_DECODE` in `attention/latent.py` gives the supported shapes and dtypes.

    Args:
        q: bfloat16 or float16 [rows, heads, key_dim].
        pages: [num_pages, 1, page_size, key_dim] in q's dtype; a value is the first `rank` channels of its
            key. Contents for tokens that no query sees do not affect results, even if they are NaN.
        block_tables: int32 [rows, width], page ids in order.
        lengths: int32 [rows], tokens of each sequence including the query's, at most width * page_size; 0
            gives zeros.
        options: only a scale.
        work: from `latent_work`, for these lengths and heads; None creates one. Many layers can share a list.
        device: the device that this will run on, for its limits; None: an H100 or H200.
        in_place: products add to their accumulators in place. Pallas interprets only the other form, which
            adds afterwards.
        interpret: as in `plgpu.kernel`.

    Returns:
        [rows, heads, rank], in q's dtype.
    """
    options.require()
    rows, heads, key_dim = q.shape
    blocks, group = head_blocks(heads)
    padded = blocks * group
    if padded > heads:
        q = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0)))
    work = latent_work(heads, lengths, device=device) if work is None else work
    signals = jax.new_ref(work.signals) if isinstance(work.signals, jax.Array) else work.signals
    half = rank // HALVES
    copies = TILE // min(pages.shape[2], TILE)
    scratch = Scratch(
        factors=plgpu.SMEM((ROWS,), jnp.float32),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
        # the last: for tiles that are cleared first
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES + 1),
        given=plgpu.Barrier(),
        q_full=plgpu.Barrier(),
        shared=plgpu.RefUnion(
            tiled((ROWS, key_dim), q.dtype),
            tiled((HALVES, ROWS, half), q.dtype),
            tiled((HALVES, ROWS, half // 2), jnp.dtype(jnp.float32), 16),
            tiled((rank // COLUMNS, ROWS, COLUMNS), q.dtype),
        ),
        taken=plgpu.Barrier(),
        tiles=tiled((STAGES, TILE, key_dim), q.dtype),
        weights=tiled((ROWS, TILE), q.dtype),
    )
    out, *_ = plgpu.kernel(
        body(run, Outputs, Form(group, rank, options.scale, in_place)),
        out_type=(
            jax.ShapeDtypeStruct((rows, padded, rank), q.dtype),
            jax.ShapeDtypeStruct((work.slots, group, rank), jnp.float32),
            jax.ShapeDtypeStruct((work.slots, ROWS), jnp.float32),
        ),
        scratch_types=[scratch],
        grid=(work.blocks,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        kernel_name="latent_attention_decode",
        # all reductions are within warps
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(Inputs(q, pages, block_tables, lengths, work.first, work.items, work.joins, signals))
    result: jax.Array = out[:, :heads]
    return result


def head_blocks(heads: int) -> tuple[int, int]:
    """The number of blocks of heads, and heads of a block. TMA copies whole tiles of shared memory, 8 rows
    each.
    """
    blocks = -(-heads // ROWS)
    return blocks, -(-heads // (8 * blocks)) * 8


def latent_work(heads: int, lengths: jax.Array, *, device: jax.Device | None = None) -> WorkList:
    """The work list of `latent_attention_decode` for all layers with this many query heads and these
    lengths.
    """
    return even_work(lengths, head_blocks(heads)[0], blocks=targets.cores(device))
