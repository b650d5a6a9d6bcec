"""Caches that kernels support. Each function returns the reason why not, or None.

Arrays may be any objects with a shape and a dtype.
"""

from __future__ import annotations

import jax

from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import DTYPES, capability

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


def why_no_cache(
    k_pages: Pages, v_pages: Pages, device: jax.Device | None, capabilities: tuple[str, ...]
) -> str | None:
    """Why no kernel for these compute capabilities supports this cache, or None."""
    if capability(device) not in capabilities:
        kind = (device or jax.devices()[0]).device_kind
        return f"device={kind}: the kernel is for GPUs of compute capability {', '.join(capabilities)}"
    stored, same = _stored(k_pages), _stored(v_pages)
    if stored not in STORED:
        return f"k_pages={stored}: the kernel takes {', '.join(STORED)} (uint8: the bits of float8_e4m3fn)"
    if same != stored:
        return f"v_pages={same}: the kernel takes what k_pages has, {stored}"
    page_size, head_dim = k_pages.shape[2:]
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}: the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    if page_size not in PAGE_SIZES and page_size % PAGE_SIZES[-1]:
        return (
            f"page_size={page_size}: the kernel takes {', '.join(map(str, PAGE_SIZES))} and multiples of"
            f" {PAGE_SIZES[-1]}"
        )
    return None


def _stored(pages: Pages) -> str:
    return f"quantized {pages.values.dtype}" if isinstance(pages, Quantized) else str(pages.dtype)
