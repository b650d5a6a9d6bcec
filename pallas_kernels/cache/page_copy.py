"""Copies whole pages of a cache to other pages, in place: a Pallas Mosaic GPU kernel.

A block copies up to 64 tokens of one head: on Hopper by TMA and shared memory, elsewhere by registers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ampere import gathered, scattered
from pallas_kernels.mosaic.versions import store
from pallas_kernels.quantization.quantized import Pages

TOKENS, THREADS = 64, 128  # of a block, at most
BY_THREAD = plgpu.Layout.TILED(  # [THREADS], a number in each
    plgpu.Tiling(((THREADS,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def copy_pages(
    k_pages: Pages,
    v_pages: Pages,
    sources: jax.Array,
    destinations: jax.Array,
    *,
    tma: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Pages, Pages]:
    """Copies whole pages, keys and values with their scales. See `support.why_no_gpu_cache` for supported
    arrays.

    The cache is updated in place if the caller donates it. Under `shard_map` this needs check_vma=False.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], or Quantized, both of one dtype.
        sources, destinations: as in `cache.xla.copy_pages`; copies to the null page are skipped.
        tma: whether TMA copies, which needs compute capability 9.0.
        interpret: as in `plgpu.kernel`.
    """
    kv_heads, page_size = k_pages.shape[1:3]
    tokens, arrays = min(page_size, TOKENS), jax.tree.leaves(k_pages)
    smem = [plgpu.SMEM((tokens, *array.shape[3:]), array.dtype) for array in arrays]
    cache: tuple[Pages, Pages] = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    plgpu.kernel(
        partial(_run, tokens),
        scratch_types=[smem, plgpu.Barrier(num_arrivals=len(arrays))] if tma else [],
        grid=(2, kv_heads, page_size // tokens, sources.shape[0]),
        grid_names=("which", "head", "part", "copy"),
        kernel_name="copy_pages",
        interpret=interpret,
    )(cache, sources, destinations)
    copied: tuple[Pages, Pages] = jax.tree.map(jax.freeze, cache)
    return copied


def _run(tokens: int, cache: Any, sources: Any, destinations: Any, *scratch: Any) -> None:
    which, head, part, copy = (lax.axis_index(name) for name in ("which", "head", "part", "copy"))
    block, move = (head, pl.ds(part * tokens, tokens)), _by_tma if scratch else _by_registers
    source, destination = (sources[copy], *block), (destinations[copy], *block)
    for index, pages in enumerate(cache):
        moved = partial(move, jax.tree.leaves(pages), source, destination, *scratch)
        pl.when((which == index) & (destination[0] > 0))(moved)


def _by_tma(refs: Any, source: Any, destination: Any, smem: Any, full: Any) -> None:
    for ref, mine in zip(refs, smem, strict=True):
        plgpu.copy_gmem_to_smem(ref.at[source], mine, full)
    plgpu.barrier_wait(full)
    for ref, mine in zip(refs, smem, strict=True):
        plgpu.copy_smem_to_gmem(mine, ref.at[destination])
    plgpu.wait_smem_to_gmem(0)


def _by_registers(refs: Any, source: Any, destination: Any) -> None:
    numbers, *scales = refs
    page, head, part = destination
    shape = part.size, numbers.shape[3]
    width = min(16 // numbers.dtype.itemsize, shape[0] * shape[1] // THREADS)  # loads of at most 16 bytes
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=width)
    store(numbers.at[destination], plgpu.load(numbers.at[source], layout=layout, optimized=False))
    for scale in scales:  # of fewer tokens than threads
        thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=BY_THREAD)
        token, line = part.start + jnp.minimum(thread, part.size - 1), page * scale.shape[1] + head
        values = gathered(scale, source[0] * scale.shape[1] + head, token, BY_THREAD)
        scattered(scale, jnp.where(thread < part.size, line, -1), token, values, BY_THREAD)
