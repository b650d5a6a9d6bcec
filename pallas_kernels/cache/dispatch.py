"""Chooses the implementation of writes to a paged cache and of copies of pages: a kernel if one supports the
arrays, otherwise XLA.

`impl` and `device` are as in `attention.dispatch`.
"""

from __future__ import annotations

import jax

from pallas_kernels import targets
from pallas_kernels.cache import xla
from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.support import why_no_cache
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation, cpu_rotates, rotate
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import DTYPES, HOPPER, Impl, kernel_serves


def why_kv_write_unsupported(
    k_pages: Pages, v_pages: Pages, qkv: Qkv | QkvProduct, *, device: jax.Device | None = None
) -> str | None:
    """Why the kernel for `kv_write` does not support these arrays, or None."""
    if str(qkv.dtype) not in DTYPES:
        return f"qkv={qkv.dtype}: the kernel takes {' and '.join(DTYPES)}"
    for pages in (k_pages, v_pages):
        if not isinstance(pages, Quantized) and pages.dtype != qkv.dtype:
            return f"qkv={qkv.dtype}: the kernel takes the cache's dtype, {pages.dtype}"
    return why_no_cache(k_pages, v_pages, device, HOPPER)


def kv_write(
    k_pages: Pages,
    v_pages: Pages,
    qkv: Qkv | QkvProduct,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    rows: int,
    rotation: Rotation | None = None,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> tuple[Queries, tuple[Pages, Pages]]:
    """Normalizes and rotates queries and keys, and writes keys and values to their pages, in place if the
    caller donates the cache.

    Args:
        impl, device: see the module.
        The others, and the result: see `cache.xla.kv_write`.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    serves = kernel_serves(impl, why_kv_write_unsupported(k_pages, v_pages, qkv, device=device), device)
    if not serves:
        if rotation is not None and impl != "xla":
            qkv, rotation = _rotated(qkv, rotation, device), None
        return xla.kv_write(k_pages, v_pages, qkv, page_ids, offsets, rows=rows, rotation=rotation)
    from pallas_kernels.cache import hopper_write as kernel

    cores = targets.cores(device or jax.devices()[0])
    return kernel.kv_write(
        k_pages, v_pages, qkv, page_ids, offsets, rows=rows, rotation=rotation, cores=cores
    )


def _rotated(qkv: Qkv | QkvProduct, rotation: Rotation, device: jax.Device | None) -> Qkv:
    if isinstance(qkv, QkvProduct) and qkv.norm is None and cpu_rotates(qkv.rows, rotation, device):
        from pallas_kernels.elementwise import cpu

        return Qkv(*cpu.rotate_qkv(qkv.rows, qkv.group, *rotation), qkv.rows[:, :, qkv.group + 1])
    q, k, v = qkv.split()
    return Qkv(rotate(q, rotation, device=device), rotate(k, rotation, device=device), v)


def why_copy_pages_unsupported(
    k_pages: Pages, v_pages: Pages, *, device: jax.Device | None = None
) -> str | None:
    """Why the kernel for `copy_pages` does not support these arrays, or None."""
    return why_no_cache(k_pages, v_pages, device, HOPPER)


def copy_pages(
    k_pages: Pages,
    v_pages: Pages,
    sources: jax.Array,
    destinations: jax.Array,
    *,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> tuple[Pages, Pages]:
    """Copies whole pages, keys and values with their scales, in place if the caller donates the cache.

    Args:
        impl, device: see the module.
        The others, and the result: see `cache.xla.copy_pages`.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    serves = kernel_serves(impl, why_copy_pages_unsupported(k_pages, v_pages, device=device), device)
    if not serves:
        return xla.copy_pages(k_pages, v_pages, sources, destinations)
    from pallas_kernels.cache import hopper_copy as kernel

    return kernel.copy_pages(k_pages, v_pages, sources, destinations)
