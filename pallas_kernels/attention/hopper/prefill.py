"""Paged attention for tiles of a prompt, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

A warpgroup multiplies 64 rows at a time on the tensor cores. Rows are (head, token) pairs: the tokens of a
tile for one query head, then for the next query head of the same kv head. So 64 rows are one head of a tile
of 64 tokens, or four heads of a tile of 16, and a full tile wastes no arithmetic. The two compute warpgroups
of a block share the keys and values that its memory warpgroup copies by TMA (`feed`), so each byte serves 128
multiplications. If a kv head has at most 64 rows, a block has one compute warpgroup.

Blocks are persistent: the grid has as many as the device holds at a time, and each block processes a sequence
of items (tile, kv head, 128 rows), those with the most keys first (`walk`). The memory warpgroup runs ahead
across item boundaries. The next item's queries are fetched as soon as the last scores of an item are
computed, and an item's result is stored while the next item runs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import targets
from pallas_kernels.attention.hopper.prefill_feed import ring
from pallas_kernels.attention.hopper.prefill_form import Form, form_of
from pallas_kernels.attention.hopper.prefill_kernel import Inputs, Outputs, PrefillCall, Scratch, Warpgroup
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import LOG2_E
from pallas_kernels.attention.support import GPU_OPTIONS
from pallas_kernels.attention.walk import Walk, longest_first
from pallas_kernels.mosaic.hopper import tiled
from pallas_kernels.mosaic.refs import body
from pallas_kernels.quantization.quantized import Pages, Quantized, numbers


def paged_attention_prefill(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    until: jax.Array | None = None,
    block_k: int | None = None,
    stages: int | None = None,
    blocks: int | None = None,
    device: jax.Device | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Attention from tiles of consecutive queries, each of one sequence, to the tokens in the sequence's
    pages; causal, or further.

    Args:
        q: bfloat16 or float16 [tiles, tile, heads, head_dim], tile a multiple of 8, head_dim 64, 128 or 256.
            Query head h reads kv head h // (heads // kv_heads). The tile's own keys and values are already in
            the pages.
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype, or both Quantized to the
            same dtype; page_size 16, 32 or a multiple of 64. Contents for tokens that no query sees do not
            affect results, even if they are NaN.
        block_tables: int32 [tiles, width], page ids in order. Entries are read up to a tile's last real
            query, including some before its window.
        positions: int32 [tiles], position of each tile's first query.
        lengths: int32 [tiles], real queries of each tile. The others return undefined, finite values. A tile
            without real queries reads nothing.
        options: without slopes; scale is positive.
        until: int32 [tiles, tile], position of the last token that each query sees, at least its own; None:
            its own.
        block_k: keys per stage, a multiple of 64; None chooses by shape.
        stages: stages in flight; None chooses by shape and shared memory.
        blocks: thread blocks of the grid; None: as many as the device holds at a time. Results do not depend
            on it.
        device: the device that this will run on, for its number of multiprocessors; None: an H100 or H200.
        operand_in_registers: the second product reads its left operand from registers and accumulates in
            place. False goes through shared memory, which is slower but the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`.

    Returns:
        [tiles, tile, heads, head_dim], in q's dtype.
    """
    pages = numbers(k_pages) if isinstance(k_pages, Quantized) else k_pages
    rows, (*_, page_size, head_dim) = q.shape[1] * (q.shape[2] // pages.shape[1]), pages.shape
    eight_bits = pages.dtype != q.dtype
    form = form_of(rows, head_dim, page_size, eight_bits=eight_bits, block_k=block_k, stages=stages)
    turn = plgpu.Barrier(num_arrivals=2) if form.warpgroups == 2 else None
    p = None if operand_in_registers else tiled((form.warpgroups, form.rows, form.block_k), q.dtype)
    arrays = q, k_pages, v_pages, block_tables, positions, lengths, options, until
    where: dict[str, Any] = {"blocks": blocks, "device": device, "interpret": interpret}
    return launch(form, Warpgroup, {"p": p, "turn": turn}, *arrays, **where)


def launch(
    form: Form,
    kind: type[Warpgroup],
    scratch: dict[str, Any],
    *call: Any,
    blocks: int | None,
    device: jax.Device | None,
    **kernel: Any,
) -> jax.Array:
    """Launches the kernel.

    Args:
        kind, scratch: the class of the warpgroups, and the fields of `Scratch` that only this class has.
        call: arrays, options and `until` of `paged_attention_prefill`.
        kernel: more arguments of `plgpu.kernel`.
    """
    q, k_pages, v_pages, block_tables, positions, lengths, options, until = call
    options.require(*GPU_OPTIONS)
    tiles, tile, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    pages = [numbers(x) if isinstance(x, Quantized) else x for x in (k_pages, v_pages)]
    scales = [x.scale for x in (k_pages, v_pages) if isinstance(x, Quantized)]
    rows, of_warpgroup = heads // kv_heads * tile, form.rows
    warpgroups, items = form.warpgroups, tiles * kv_heads * form.shares
    # With one compute warpgroup, two blocks share a multiprocessor: one computes while the other starts or
    # ends.
    walk = Walk(items, min(items, blocks or (targets.cores(device) if warpgroups == 2 else items)))
    memory = Scratch(
        k=ring(pages[0], q.dtype, form.stages, form.block_k, warpgroups),
        out=tiled((warpgroups, of_warpgroup, form.columns), q.dtype),
        q_full=plgpu.Barrier(
            num_arrivals=of_warpgroup // math.gcd(tile, of_warpgroup), num_barriers=warpgroups
        ),
        q=tiled((warpgroups, of_warpgroup, head_dim), q.dtype),
        v=ring(pages[1], q.dtype, form.stages, form.block_k, warpgroups),
        **scratch,
    )
    places = form.shares * warpgroups * of_warpgroup
    by_row = None
    if options.sinks is not None:  # one value per (head, token) pair
        values = jnp.repeat(options.sinks.reshape(kv_heads, -1) * LOG2_E, tile, axis=1)
        by_row = jnp.pad(values, ((0, 0), (0, places - rows)))
    if until is not None:
        real = jnp.arange(tile) < lengths[:, None]
        longest = jnp.where(real, until, 0).max(1, keepdims=True)
        lengths = jnp.where(lengths > 0, longest[:, 0] + 1 - positions, 0)
        # one for each (head, token) pair; padding sees no more than others
        last = jnp.tile(jnp.minimum(until, longest), (1, heads // kv_heads))
        until = jnp.pad(last, ((0, 0), (0, places - rows)))
    out: jax.Array = plgpu.kernel(
        body(kind.run, Outputs, PrefillCall(walk, form, options.static)),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[memory],
        grid=(walk.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **kernel,
    )(Inputs(q, block_tables, longest_first(positions, lengths), by_row, until, *pages, *scales))
    return out
