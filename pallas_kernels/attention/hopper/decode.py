"""Paged attention for decode rows, one query each, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

Persistent thread blocks, as many as the GPU holds at a time, process the items of a work list: tiles of 64
tokens of a (group of rows, kv head) pair. A block's memory warpgroup copies the tiles by TMA, page by page,
as the block table lists them. Its compute warpgroup folds each tile into an online softmax (Milakov and
Gimelshein, 2018; Dao et al., 2022). The tensor cores multiply 64 queries at a time: the query heads of a kv
head, of up to eight rows of one sequence, each of which masks the tokens behind its own. So these rows read
the sequence's pages once. Results of the other lines of a product are discarded, which wastes arithmetic but
no memory bandwidth, which limits decoding.

If the work list splits a pair, each part's result and the logarithm of its softmax sum are stored, and the
block with the last part joins them (Flash-Decoding; Dao et al., 2023; `attention_join`). That block waits for
blocks with smaller indices, which the hardware starts first; so the kernel ends even if not all blocks run at
the same time. Scales of an eight-bit cache multiply scores and weights in float32. Its keys, and queries, are
multiplied in float16.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import targets
from pallas_kernels.attention.hopper.decode_feed import QUERY_UNIT, product_dtype, ring_of
from pallas_kernels.attention.hopper.decode_kernel import Form, Inputs, Outputs, Scratch, run
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.support import GPU_OPTIONS
from pallas_kernels.attention.work_list import TILE, WorkList, decode_blocks, even_work, lines_of
from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, tiled
from pallas_kernels.mosaic.refs import body
from pallas_kernels.quantization.quantized import Pages
from pallas_kernels.targets import BLOCKS


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    work: WorkList | None = None,
    device: jax.Device | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Attends from one query per row to all tokens of its sequence.

    `support.why_no_gpu_attention` gives the supported shapes and dtypes.

    Args:
        q: bfloat16 or float16 [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
            With an eight-bit cache, numbers of bfloat16 must be below 4e6.
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype, or Quantized to int8 or to
            the bits of float8_e4m3fn. Contents for tokens that no query sees do not affect results, even if
            they are NaN.
        block_tables: int32 [rows, width], page ids in order. Entries are read up to a row's length, including
            some before its window; of a group of rows, those of the first.
        lengths: int32 [rows], tokens of each sequence including the query's, at most width * page_size; 0
            gives zeros.
        options: without slopes.
        work: a work list for these lengths and kv heads, for this window or a larger one, and for groups of
            at most `work_list.most_rows` rows; None creates one without groups. Many layers can share a list,
            best one that is `shared`.
        device: the device that this will run on, for its limits; None: an H100 or H200.
        operand_in_registers: the second product reads its left operand from registers and accumulates in
            place. False goes through shared memory, which is slower but the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`. Pallas interprets no semaphores: with `inline_mgpu="ignore"`, it
            interprets the kernel for work lists that split no pair.

    Returns:
        [rows, heads, head_dim], in q's dtype.
    """
    options.require(*GPU_OPTIONS)
    rows, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    group = heads // kv_heads
    lines = lines_of(group)
    at_a_time = decode_blocks(k_pages, device)
    if work is None:
        work = even_work(lengths, kv_heads, blocks=at_a_time, window=options.window)
    if work.most_rows * lines > ROWS:
        raise ValueError(
            f"work.most_rows={work.most_rows}: a product holds {ROWS // lines} rows of {group} queries"
        )
    pairs = BLOCKS if at_a_time > targets.cores(device) and work.blocks % BLOCKS == 0 else 1
    of_pairs, parts = (pairs,) if pairs > 1 else (), head_dim // COLUMNS
    queries = q.reshape(rows * heads, head_dim)
    if len(queries) < lines:
        queries = jnp.pad(queries, ((0, lines - len(queries)), (0, 0)))
    signals = jax.new_ref(work.signals) if isinstance(work.signals, jax.Array) else work.signals
    in_product, static = product_dtype(q.dtype, k_pages), options.static
    if in_product != q.dtype:
        static = replace(static, scale=static.scale / QUERY_UNIT)
    lists = work.first, work.items, work.joins, signals
    scratch = Scratch(
        o=tiled((*of_pairs, parts, ROWS, COLUMNS), q.dtype, rows=math.gcd(group, 8)),
        p=None if operand_in_registers else tiled((*of_pairs, ROWS, TILE), q.dtype),
        part=plgpu.SMEM((*of_pairs, ROWS, COLUMNS), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=parts, num_barriers=pairs * work.most_rows),
        q=tiled((*of_pairs, ROWS, head_dim), in_product),
        ring=ring_of(q.dtype, k_pages, pairs),
    )

    out, *_ = plgpu.kernel(
        body(run, Outputs, Form(rows, work.most_rows, group, lines, static)),
        out_type=(
            jax.ShapeDtypeStruct((rows * heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((work.slots, lines, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((work.slots, ROWS), jnp.float32),
        ),
        scratch_types=[scratch],
        grid=(work.blocks // pairs,),
        grid_names=("block",),
        num_threads=2 * pairs,
        thread_name="warpgroup",
        kernel_name="paged_attention_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(Inputs(queries, k_pages, v_pages, block_tables, lengths, *lists, options.sinks))
    result: jax.Array = out.reshape(q.shape)
    return result
