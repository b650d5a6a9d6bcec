"""Shapes, dtypes and devices that kernels support. Each `why_no_` function returns the reason why not, or
None.

Arrays may be any objects with a shape and a dtype. `device` is the device to run on; None: the first of the
default backend.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax

from pallas_kernels.devices import kernels_refused
from pallas_kernels.options import AttentionOptions
from pallas_kernels.quantized import Pages, Quantized

Impl = Literal["auto", "mosaic", "llvm", "xla"]
HOPPER, AMPERE = ("9.0",), ("8.0", "8.6", "8.9")  # compute capabilities; Ada counts as Ampere
DTYPES = ("bfloat16", "float16")
STORED = (*DTYPES, "quantized int8", "quantized uint8")
STORED_ON_CPU = ("bfloat16", "float32", "quantized int8", "quantized uint8")
GPU_OPTIONS = "window", "soft_cap", "sinks"  # of attention, besides the scale
CPU_OPTIONS = *GPU_OPTIONS, "slopes"
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)  # and multiples of 64


def on_cpu(device: jax.Device | None) -> bool:
    return getattr(device or jax.devices()[0], "platform", None) == "cpu"


def why_no_cpu_attention(k_pages: Pages, v_pages: Pages, options: AttentionOptions) -> str | None:
    return options.refused(*CPU_OPTIONS) or why_no_cpu_cache(k_pages, v_pages)


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


def capability(device: jax.Device | None) -> str | None:
    return getattr(device or jax.devices()[0], "compute_capability", None)


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


def kernel_serves(impl: Impl, refused: str | None, device: jax.Device | None) -> bool:
    """Whether to use the device's kernel. `refused` is the reason why it does not support the arrays, or
    None.

    Raises:
        ValueError: impl is unknown, or names a kernel that cannot be used here.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r}: one of {', '.join(map(repr, get_args(Impl)))}")
    if impl not in ("auto", "xla"):
        if refused is None and (impl == "llvm") != on_cpu(device):
            refused = (
                f"device={(device or jax.devices()[0]).device_kind}: Mosaic's kernels are for GPUs, LLVM's"
                " for CPUs"
            )
        if refused is not None:
            raise ValueError(f"impl={impl!r}: {refused}")
    return impl != "xla" and refused is None and kernels_refused() is None
