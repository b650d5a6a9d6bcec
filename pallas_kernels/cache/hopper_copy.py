"""Copies whole pages of a cache to other pages, in place: a Pallas Mosaic GPU kernel for Hopper.

A block copies up to 64 tokens of one head through shared memory with TMA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantization.quantized import Pages

TOKENS = 64  # maximum per block


def copy_pages(
    k_pages: Pages,
    v_pages: Pages,
    sources: jax.Array,
    destinations: jax.Array,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Pages, Pages]:
    """Copies whole pages, keys and values with their scales. See `dispatch.why_copy_pages_unsupported` for
    supported arrays.

    The cache is updated in place if the caller donates it. Under `shard_map` this needs check_vma=False.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], or Quantized, both of one dtype.
        sources, destinations: as in `cache.xla.copy_pages`; copies to the null page are skipped.
        interpret: as in `plgpu.kernel`.
    """
    kv_heads, page_size = k_pages.shape[1:3]
    tokens = min(page_size, TOKENS)
    arrays = jax.tree.leaves(k_pages)
    cache: tuple[Pages, Pages] = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    plgpu.kernel(
        _kernel,
        scratch_types={
            "smem": [plgpu.SMEM((tokens, *array.shape[3:]), array.dtype) for array in arrays],
            "full": plgpu.Barrier(num_arrivals=len(arrays)),
        },
        grid=(2, kv_heads, page_size // tokens, sources.shape[0]),
        grid_names=("which", "head", "part", "copy"),
        kernel_name="copy_pages",
        interpret=interpret,
    )(cache, sources, destinations)
    copied: tuple[Pages, Pages] = jax.tree.map(jax.freeze, cache)
    return copied


def _kernel(cache: Any, sources: Any, destinations: Any, *, smem: Any, full: Any) -> None:
    which, head, part, copy = (lax.axis_index(name) for name in ("which", "head", "part", "copy"))
    source, destination = sources[copy], destinations[copy]
    tokens = smem[0].shape[0]

    def move(pages: Any) -> None:
        refs, these = jax.tree.leaves(pages), pl.ds(part * tokens, tokens)
        for ref, mine in zip(refs, smem, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[source, head, these], mine, full)
        plgpu.barrier_wait(full)
        for ref, mine in zip(refs, smem, strict=True):
            plgpu.copy_smem_to_gmem(mine, ref.at[destination, head, these])
        plgpu.wait_smem_to_gmem(0)

    for index, pages in enumerate(cache):
        pl.when((which == index) & (destination > 0))(partial(move, pages))
