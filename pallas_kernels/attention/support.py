"""Attention that kernels support. Each function returns the reason why not, or None.

Arrays may be any objects with a shape and a dtype.
"""

from __future__ import annotations

import jax

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.support import why_no_cache, why_no_cpu_cache
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import AMPERE, DTYPES, HOPPER, capability

GPU_OPTIONS = "window", "soft_cap", "sinks"  # of attention, besides the scale


CPU_OPTIONS = *GPU_OPTIONS, "slopes"


def why_no_cpu_attention(k_pages: Pages, v_pages: Pages, options: AttentionOptions) -> str | None:
    return options.refused(*CPU_OPTIONS) or why_no_cpu_cache(k_pages, v_pages)


def why_no_gpu_attention(
    q: jax.Array, k_pages: Pages, v_pages: Pages, options: AttentionOptions, device: jax.Device | None
) -> str | None:
    if (why := options.refused(*GPU_OPTIONS)) is not None:
        return why
    if str(q.dtype) not in DTYPES:
        return f"dtype={q.dtype}: the kernel takes {' and '.join(DTYPES)}"
    if not isinstance(k_pages, Quantized) and k_pages.dtype != q.dtype:
        return (
            f"k_pages={k_pages.dtype}: the kernel takes the queries' dtype, {q.dtype}, or a quantized cache"
        )
    if capability(device) in AMPERE and isinstance(k_pages, Quantized):
        return f"k_pages={k_pages.kind}: the kernel for Ampere and Ada takes no quantized cache"
    return why_no_cache(k_pages, v_pages, device, HOPPER + AMPERE)
