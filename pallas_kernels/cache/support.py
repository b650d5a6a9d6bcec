"""Caches that kernels support. Each function returns the reason why not, or None.

Arrays may be any objects with a shape and a dtype. The device is known to be one of the kernel's target.
"""

from __future__ import annotations

from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import DTYPES

STORED = (*DTYPES, "quantized int8", "quantized uint8")
STORED_ON_CPU = ("bfloat16", "float32", "quantized int8", "quantized uint8")
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)  # and multiples of 64


def why_no_cpu_cache(k_pages: Pages, v_pages: Pages) -> str | None:
    for name, pages in ("k_pages", k_pages), ("v_pages", v_pages):
        if _stored(pages) not in STORED_ON_CPU:
            return (
                f"{name}={_stored(pages)}: the kernel takes {', '.join(STORED_ON_CPU)} (uint8: the bits of"
                " float8_e4m3fn)"
            )
    return (
        None
        if _stored(k_pages) == _stored(v_pages)
        else f"v_pages={_stored(v_pages)}: the kernel takes what k_pages has"
    )


def why_no_gpu_cache(k_pages: Pages, v_pages: Pages) -> str | None:
    stored, same = _stored(k_pages), _stored(v_pages)
    if stored not in STORED:
        return f"k_pages={stored}: the kernel takes {', '.join(STORED)} (uint8: the bits of float8_e4m3fn)"
    if same != stored:
        return f"v_pages={same}: the kernel takes what k_pages has, {stored}"
    page_size, head_dim = k_pages.shape[2:]
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}: the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    return why_page_size_unsupported(page_size)


def why_no_gpu_write(k_pages: Pages, v_pages: Pages, qkv: Qkv | QkvProduct) -> str | None:
    if str(qkv.dtype) not in DTYPES:
        return f"qkv={qkv.dtype}: the kernel takes {' and '.join(DTYPES)}"
    for pages in (k_pages, v_pages):
        if not isinstance(pages, Quantized) and pages.dtype != qkv.dtype:
            return f"qkv={qkv.dtype}: the kernel takes the cache's dtype, {pages.dtype}"
    return why_no_gpu_cache(k_pages, v_pages)


def why_page_size_unsupported(page_size: int) -> str | None:
    if page_size in PAGE_SIZES or page_size % PAGE_SIZES[-1] == 0:
        return None
    return (
        f"page_size={page_size}: the kernel takes {', '.join(map(str, PAGE_SIZES))} and multiples of"
        f" {PAGE_SIZES[-1]}"
    )


def _stored(pages: Pages) -> str:
    return f"quantized {pages.values.dtype}" if isinstance(pages, Quantized) else str(pages.dtype)
