"""Which form of a function a device, a dtype and a shape take: the kernel where it serves them, else XLA's.

`impl` is "auto", "mosaic" (a GPU's kernel), "llvm" (a CPU's), "flashinfer" (decode attention by FlashInfer's kernel) or "xla". A form
that is asked for by name is taken or refused; it is never replaced. "auto" takes FlashInfer's kernel where `tune` measured it to be faster.
Each function has one beside it that says beforehand why the device's kernel cannot take some arrays, or None if it can; what it is given
may be arrays, or whatever has their shapes and dtypes.

Everywhere, `device` is the one that the function will run on, which may be one of a topology to compile for; None is the first of
the default backend. What builds a GPU's kernels is imported where one is taken: Mosaic takes a third of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from pallas_kernels import products, tuning, work_list, xla
from pallas_kernels.flashinfer import decode as flashinfer
from pallas_kernels.qkv import Qkv, QkvProduct
from pallas_kernels.quantized import Pages, Quantized
from pallas_kernels.support import (
    AMPERE,
    capability,
    kernel_serves,
    on_cpu,
    why_no_cache,
    why_no_cpu_attention,
    why_no_gpu_attention,
)
from pallas_kernels.support import DTYPES as DTYPES
from pallas_kernels.support import HOPPER as HOPPER
from pallas_kernels.support import Impl as Impl
from pallas_kernels.work_list import WorkList
from pallas_kernels.xla import Queries, Rotation

why_flashinfer_unsupported = flashinfer.why_unsupported


def why_decode_unsupported(q: jax.Array, k_pages: Pages, v_pages: Pages, *, device: jax.Device | None = None) -> str | None:
    """Why the kernel for `paged_attention_decode` cannot take these, or None."""
    if on_cpu(device):
        return why_no_cpu_attention(k_pages, v_pages)
    heads, kv_heads = q.shape[-2], k_pages.shape[1]
    if capability(device) in HOPPER:
        from pallas_kernels.attention_decode import QUERIES

        if heads > QUERIES * kv_heads:
            return f"heads={heads}: the kernel takes at most {QUERIES} for each of {kv_heads} kv heads"
    return why_no_gpu_attention(q, k_pages, v_pages, device)


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    pages: int = 0,
    work: WorkList | None = None,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """One query a sequence, over all of the sequence's tokens.

    Args:
        pages: see `xla.paged_attention_decode`; the kernel reads as many as each sequence has.
        work: of `decode_work`, for Hopper's kernel; None: made for this call. Other forms need none.
        impl, device: see the module.
        The others, and what is returned: see `xla.paged_attention_decode`.

    Raises:
        ValueError: impl="mosaic", "llvm" or "flashinfer" where the kernel cannot serve; says why.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if flashinfer.serves(impl, q, k_pages, v_pages, window, soft_cap, device):
        del how["soft_cap"]
        return flashinfer.paged_attention_decode(q, _plain(k_pages), _plain(v_pages), block_tables, lengths, **how, device=device)
    if not kernel_serves(impl, why_decode_unsupported(q, k_pages, v_pages, device=device), device):
        return xla.paged_attention_decode(q, k_pages, v_pages, block_tables, lengths, **how, pages=pages)
    if on_cpu(device):
        from pallas_kernels.cpu import attention

        return attention.paged_attention_decode(q, k_pages, v_pages, block_tables, lengths, **how)
    if capability(device) in AMPERE:
        from pallas_kernels import ampere

        return ampere.paged_attention_decode(q, _plain(k_pages), _plain(v_pages), block_tables, lengths, **how)
    from pallas_kernels import attention_decode

    how |= {"work": work, "device": device or jax.devices()[0]}
    return attention_decode.paged_attention_decode(q, k_pages, v_pages, block_tables, lengths, **how)


def decode_work(
    k_pages: Pages,
    lengths: jax.Array,
    *,
    tokens: int,
    window: int | None = None,
    batch_invariant: bool = False,
    device: jax.Device | None = None,
) -> WorkList | None:
    """How blocks of threads share the work of `paged_attention_decode`, for all layers with such pages, lengths and window.

    Args:
        lengths: int32 [rows], as there.
        tokens: the longest length that there may be.
        batch_invariant: sequences are cut where a row's result does not depend on the other rows.

    Returns:
        None where the device has no kernel that takes one.
    """
    if capability(device) not in HOPPER:
        return None
    kv_heads, _, head_dim = k_pages.shape[1:]
    stored = k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype
    blocks = tuning.decode_blocks(str(stored), head_dim, device or jax.devices()[0])
    if batch_invariant:
        return work_list.fixed_work(lengths, kv_heads, blocks=blocks, tokens=tokens, window=window)
    return work_list.even_work(lengths, kv_heads, blocks=blocks, window=window)


def why_prefill_unsupported(q: jax.Array, k_pages: Pages, v_pages: Pages, *, device: jax.Device | None = None) -> str | None:
    """Why the kernel for `paged_attention_prefill` cannot take these, or None."""
    if on_cpu(device):
        return why_no_cpu_attention(k_pages, v_pages)
    refused = why_no_gpu_attention(q, k_pages, v_pages, device)
    if refused is None and capability(device) in HOPPER:
        from pallas_kernels.attention_prefill import TILE_GRID

        if q.shape[1] % TILE_GRID:
            return f"tile={q.shape[1]}: the kernel takes multiples of {TILE_GRID}"
    return refused


def paged_attention_prefill(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    pages: int = 0,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """Tiles of consecutive queries, each of one sequence, causal over the tokens in its pages.

    Args:
        pages, impl, device: as in `paged_attention_decode`.
        The others, and what is returned: see `xla.paged_attention_prefill`.

    Raises:
        ValueError: impl="mosaic" or "llvm" where the kernel cannot serve; says why.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if not kernel_serves(impl, why_prefill_unsupported(q, k_pages, v_pages, device=device), device):
        return xla.paged_attention_prefill(q, k_pages, v_pages, block_tables, positions, lengths, **how, pages=pages)
    if on_cpu(device):
        from pallas_kernels.cpu import attention

        return attention.paged_attention_prefill(q, k_pages, v_pages, block_tables, positions, lengths, **how)
    if capability(device) in AMPERE:
        from pallas_kernels import ampere

        return ampere.paged_attention_prefill(q, _plain(k_pages), _plain(v_pages), block_tables, positions, lengths, **how)
    from pallas_kernels import attention_prefill

    how["device"] = device or jax.devices()[0]
    return attention_prefill.paged_attention_prefill(q, k_pages, v_pages, block_tables, positions, lengths, **how)


def rotate(x: jax.Array, rotation: Rotation, *, device: jax.Device | None = None) -> jax.Array:
    """Rotary embedding; see `xla.rotate`. GPUs have no kernel for it alone: `kv_write` rotates, and elsewhere XLA fuses it."""
    if on_cpu(device) and products.cpu_refused() is None:
        from pallas_kernels.cpu import elementwise

        if elementwise.why_no_rotation(str(x.dtype), x.shape[-1], rotation[0].shape[-1]) is None:
            return elementwise.rotate(x, *rotation)
    return xla.rotate(x, rotation)


def why_kv_write_unsupported(k_pages: Pages, v_pages: Pages, qkv: Qkv | QkvProduct, *, device: jax.Device | None = None) -> str | None:
    """Why the kernel for `kv_write` cannot take these, or None."""
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
    """Normalizes and rotates queries and keys, and writes keys and values to their pages, in place if the caller
    donates the cache.

    Args:
        impl, device: see the module.
        The others, and what is returned: see `xla.kv_write`.

    Raises:
        ValueError: impl="mosaic" or "llvm" where the kernel cannot serve; says why.
    """
    serves = kernel_serves(impl, why_kv_write_unsupported(k_pages, v_pages, qkv, device=device), device)
    if not serves:
        if rotation is not None and impl != "xla":
            q, k, v = qkv.split()
            qkv, rotation = Qkv(rotate(q, rotation, device=device), rotate(k, rotation, device=device), v), None
        return xla.kv_write(k_pages, v_pages, qkv, page_ids, offsets, rows=rows, rotation=rotation)
    from pallas_kernels import kv_write as kernel

    cores = tuning.cores(device or jax.devices()[0])
    return kernel.kv_write(k_pages, v_pages, qkv, page_ids, offsets, rows=rows, rotation=rotation, cores=cores)


def why_copy_pages_unsupported(k_pages: Pages, v_pages: Pages, *, device: jax.Device | None = None) -> str | None:
    """Why the kernel for `copy_pages` cannot take these, or None."""
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
    """Copy whole pages, keys and values with their scales; in place where the caller donates the cache.

    Args:
        impl, device: see the module.
        The others, and what is returned: see `xla.copy_pages`.

    Raises:
        ValueError: impl="mosaic" or "llvm" where the kernel cannot serve; says why.
    """
    serves = kernel_serves(impl, why_copy_pages_unsupported(k_pages, v_pages, device=device), device)
    if not serves:
        return xla.copy_pages(k_pages, v_pages, sources, destinations)
    from pallas_kernels import copy_pages as kernel

    return kernel.copy_pages(k_pages, v_pages, sources, destinations)


def prepare(weights: Iterable[Any], q: Any, k_pages: Pages, *, device: jax.Device | None = None) -> None:
    """Make known to XLA what programs over these call by name, before such programs are loaded; on a CPU, else nothing.

    Args:
        weights: of products, arrays or Quantized; they, q and k_pages may be whatever has their shapes and dtypes.
        q: queries of attention, [..., heads, head_dim].
    """
    if on_cpu(device) and products.cpu_refused() is None:
        from pallas_kernels.cpu import attention, elementwise

        if why_no_cpu_attention(k_pages, k_pages) is None:
            attention.prepare(q, k_pages)
        elementwise.prepare(str(q.dtype))
        for weight in weights:
            if len(weight.shape) > 1:
                products.prepare(weight)


def _plain(pages: Pages) -> jax.Array:
    """As the support function says."""
    assert not isinstance(pages, Quantized)
    return pages
