"""Chooses the implementation of writes to a paged cache and of copies of pages: a kernel if one supports the
arrays, otherwise XLA.

KV_WRITE and PAGE_COPY are the tables. `impl` and `device` are as in `attention.dispatch`.
"""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels import targets
from pallas_kernels.cache import xla
from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.support import why_no_gpu_cache, why_no_gpu_write
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation, cpu_rotates, rotate
from pallas_kernels.quantization.quantized import Pages
from pallas_kernels.targets import AMPERE, HOPPER, Impl, Implementation, choose, lazy

KV_WRITE = (
    Implementation(HOPPER, why_no_gpu_write, lazy("cache.hopper_write", "kv_write")),
    Implementation(AMPERE, why_no_gpu_write, lazy("cache.ampere_write", "kv_write", "cores")),
)
_COPY = lazy("cache.page_copy", "copy_pages")
PAGE_COPY = (
    Implementation(HOPPER, why_no_gpu_cache, _COPY),
    Implementation(AMPERE, why_no_gpu_cache, partial(_COPY, tma=False)),
)


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
    kernel = choose(KV_WRITE, impl, device, k_pages, v_pages, qkv)
    if kernel is None:
        if rotation is not None and impl != "xla":
            qkv, rotation = _rotated(qkv, rotation, device), None
        return xla.kv_write(k_pages, v_pages, qkv, page_ids, offsets, rows=rows, rotation=rotation)
    options = {"rows": rows, "rotation": rotation, "cores": targets.cores(device or jax.devices()[0])}
    written: tuple[Queries, tuple[Pages, Pages]] = kernel.call(
        "kv_write", k_pages, v_pages, qkv, page_ids, offsets, **options
    )
    return written


def _rotated(qkv: Qkv | QkvProduct, rotation: Rotation, device: jax.Device | None) -> Qkv:
    if isinstance(qkv, QkvProduct) and qkv.norm is None and cpu_rotates(qkv.rows, rotation, device):
        from pallas_kernels.elementwise import cpu

        return Qkv(*cpu.rotate_qkv(qkv.rows, qkv.group, *rotation), qkv.rows[:, :, qkv.group + 1])
    q, k, v = qkv.split()
    return Qkv(rotate(q, rotation, device=device), rotate(k, rotation, device=device), v)


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
    kernel = choose(PAGE_COPY, impl, device, k_pages, v_pages)
    copy = xla.copy_pages if kernel is None else kernel.run
    copied: tuple[Pages, Pages] = copy(k_pages, v_pages, sources, destinations)
    return copied
