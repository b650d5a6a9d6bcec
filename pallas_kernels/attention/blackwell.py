"""Paged attention for tiles of a prompt on data-centre Blackwell (sm_100a), by Pallas's tcgen05.

The kernel is Hopper's (`hopper.prefill`), with the same items, copies and masks, but a compute warpgroup has
128 rows, and its products are in tensor memory: a thread has one row of the scores, so a softmax exchanges
nothing among threads, and the weights go back to tensor memory as the left operand of the second product.
Two warpgroups alternate without a barrier of their own: the tensor cores multiply for one while the other
computes exponentials (Zadouri et al., FlashAttention-4, 2026).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.prefill import launch
from pallas_kernels.attention.hopper.prefill_form import Form, form_of
from pallas_kernels.attention.hopper.prefill_kernel import Warpgroup, WarpgroupItem
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import MASKED, SMALLEST
from pallas_kernels.mosaic.blackwell import LAYOUT, ROWS, wait_loaded, wait_stored
from pallas_kernels.mosaic.hopper import per_row
from pallas_kernels.mosaic.versions import store
from pallas_kernels.quantization.quantized import Pages, Quantized

BLOCK_K = 64  # keys per stage; with more, the compiler spills registers of some forms
REGISTERS = 184, 136  # per thread of compute and memory warpgroups, if there are two of the former
PIECE = 32  # columns of the sums that are scaled at a time


class Tensor(NamedTuple):
    """Tensor memory, and barriers of its products, one for each warpgroup.

    A product's barrier is used again when all warps have looked at it: between two products of one kind, the
    warpgroup waits for its weights.

    Attributes:
        shared: scores, float32 [ROWS, warpgroups * block_k], and in their place weights in the queries'
            dtype, [ROWS, warpgroups * block_k * 2], of which a warpgroup uses the first half of its columns.
        sums: float32 [ROWS, warpgroups * head_dim].
        scored, added: barriers of products with keys, and with values.
    """

    shared: Any
    sums: Any
    scored: Any
    added: Any


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
    stages: int | None = None,
    blocks: int | None = None,
    device: jax.Device | None = None,
) -> jax.Array:
    """Arguments and the result are those of `hopper.prefill.paged_attention_prefill`."""
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    form = form_of(
        q.shape[1] * (q.shape[2] // kv_heads),
        head_dim,
        page_size,
        eight_bits=isinstance(k_pages, Quantized),
        block_k=BLOCK_K,
        stages=stages,
        of_warpgroup=ROWS,
        max_warpgroups=1 if head_dim == 256 else 2,  # there are 512 columns of tensor memory
    )
    # a power of two, or the compiler counts slots in addresses, whose alignment is then unknown
    form = replace(form, stages=1 << form.stages.bit_length() - 1, registers=REGISTERS)
    arrays = q, k_pages, v_pages, block_tables, positions, lengths, options, until
    scratch = {"p": None, "turn": None, "tensor": _tensor(form, head_dim, q.dtype)}
    return launch(form, Tcgen05, scratch, *arrays, blocks=blocks, device=device)


def _tensor(form: Form, head_dim: int, dtype: jnp.dtype[Any]) -> Tensor:
    count = form.warpgroups
    scores = plgpu.TMEM((ROWS, count * form.block_k), jnp.float32)
    weights = plgpu.TMEM((ROWS, count * form.block_k * 2), dtype, packed=True)
    done = plgpu.Barrier(num_barriers=count, orders_tensor_core=True)
    sums = plgpu.TMEM((ROWS, count * head_dim), jnp.float32)
    return Tensor(plgpu.RefUnion(scores, weights), sums, done, done)


class Tcgen05(Warpgroup):
    """A warpgroup of a thread block."""

    layout: ClassVar[Any] = LAYOUT

    def _stage(self, staged: Any, result: jax.Array) -> None:
        store(staged, result)

    def _result(self, number: jax.Array, item: WarpgroupItem, done: jax.Array) -> Callable[[int], jax.Array]:
        scratch, block_k = self.scratch, self.call.form.block_k
        (scores, weights), tensor = scratch.tensor.shared, scratch.tensor
        head_dim: int = self.inputs.q.shape[3]
        scores = scores.at[:, pl.ds(self.warpgroup * block_k, block_k)]
        weights = weights.at[:, pl.ds(self.warpgroup * 2 * block_k, block_k)]
        sums, scored, added = tensor.sums, *(x.at[self.warpgroup] for x in (tensor.scored, tensor.added))

        row = partial(per_row, rows=ROWS, layout=LAYOUT)

        def part(column: int, size: int) -> Any:
            return sums.at[:, pl.ds(self.warpgroup * head_dim + column, size)]

        def start_scores(i: jax.Array) -> None:
            slot = self._slot_of(done + i)
            plgpu.barrier_wait(scratch.k.full.at[slot])
            keys = scratch.k.smem.at[slot].transpose((1, 0))
            plgpu.tcgen05_mma(scores, scratch.q.at[self.warpgroup], keys, scored, accumulate=False)

        def fold(i: jax.Array, carry: Any) -> Any:
            m, total = carry
            slot = self._slot_of(done + i)
            plgpu.barrier_wait(scored)
            s = plgpu.async_load_tmem(scores, layout=LAYOUT)
            m, total, p, alpha = self._weigh(item, done, i, m, total, s)
            wait_loaded()
            plgpu.async_store_tmem(weights, p)

            @pl.when(i > 0)
            def rescale() -> None:
                for column in range(0, head_dim, PIECE):
                    x = plgpu.async_load_tmem(part(column, PIECE), layout=LAYOUT)
                    x = x * lax.broadcast_in_dim(alpha, x.shape, [0])
                    wait_loaded()
                    plgpu.async_store_tmem(part(column, PIECE), x)

            wait_stored()
            plgpu.tcgen05_mma(part(0, head_dim), weights, scratch.v.smem.at[slot], added, accumulate=i > 0)
            plgpu.barrier_wait(added)
            plgpu.barrier_arrive(scratch.v.free.at[slot])
            pl.when(i + 1 < item.count)(partial(start_scores, i + 1))
            return m, total

        def folded() -> jax.Array:
            plgpu.barrier_wait(scratch.q_full.at[self.warpgroup])
            start_scores(jnp.int32(0))
            start = row(MASKED), row(0.0)
            if self.inputs.sinks is not None:
                start = jnp.maximum(start[0], self._sinks(item)), row(1.0)
            _, total = lax.fori_loop(0, item.count, fold, start)
            self._fetch_queries(number + 1)
            return 1.0 / self._enlarged / jnp.maximum(total, SMALLEST)

        inverse = lax.cond(item.count > 0, folded, lambda: row(0.0))

        def columns_of(column: int) -> jax.Array:
            x = plgpu.async_load_tmem(part(column, self.call.form.columns), layout=LAYOUT)
            wait_loaded()
            x = lax.cond(item.count > 0, lambda x: x, jnp.zeros_like, x)  # the memory may hold anything
            result: jax.Array = (x * lax.broadcast_in_dim(inverse, x.shape, [0])).astype(self.inputs.q.dtype)
            return result

        return columns_of
