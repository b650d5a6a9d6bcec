"""What kernels for attention support. Each function returns the reason why not, or None.

Arrays may be any objects with a shape and a dtype. The device is known to be one of the kernel's target.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.support import why_no_cpu_cache, why_no_gpu_cache
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import why_no_dtype

GPU_OPTIONS = "window", "soft_cap", "sinks"  # of attention, besides the scale
CPU_OPTIONS = *GPU_OPTIONS, "slopes"
TILE_GRID = 8  # the number of tokens of a tile is a multiple of this, in Hopper's kernel
# of latent attention: channels of a value, of which each half is whole tiles of shared memory; a key has a
# multiple of the others, up to as many more than the largest rank
RANKS, KEY_CHANNELS = (128, 256, 384, 512), 64


def why_no_cpu_attention(
    q: Any, k_pages: Pages, v_pages: Pages, options: AttentionOptions, ahead: bool = False
) -> str | None:
    if ahead and options.slopes is not None:
        return "until: not with slopes, which take no distance to later tokens"
    return options.refused(*CPU_OPTIONS) or why_no_cpu_cache(k_pages, v_pages)


def why_no_ampere_attention(
    q: Any, k_pages: Pages, v_pages: Pages, options: AttentionOptions, ahead: bool = False
) -> str | None:
    """
    Args:
        ahead: whether queries may see later tokens.
    """
    refused = why_no_gpu_attention(q, k_pages, v_pages, options)
    return refused or ("until: this kernel is causal" if ahead else None)


def why_no_gpu_attention(q: Any, k_pages: Pages, v_pages: Pages, options: AttentionOptions) -> str | None:
    if (why := options.refused(*GPU_OPTIONS) or why_no_dtype(q)) is not None:
        return why
    if not isinstance(k_pages, Quantized) and k_pages.dtype != q.dtype:
        return (
            f"k_pages={k_pages.dtype}: the kernel takes the queries' dtype, {q.dtype}, or a quantized cache"
        )
    return why_no_gpu_cache(k_pages, v_pages)
