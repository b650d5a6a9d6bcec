"""Which form of a function a device, a dtype and a shape take: the kernel where it serves them, else XLA's.

`impl` is "auto", "mosaic" or "xla". A form that is asked for by name is taken or refused; it is never replaced.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import attention_decode, xla
from pallas_kernels.quantized import Pages, Quantized

Impl = Literal["auto", "mosaic", "xla"]
HOPPER = "9.0"  # compute capability
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)  # and multiples of the last


def supported(q: jax.Array | jax.ShapeDtypeStruct, k_pages: Pages, v_pages: Pages, *, device: jax.Device | None = None) -> str | None:
    """Why the kernel for `paged_attention_decode` cannot take these, or None if it can.

    Args:
        q, k_pages, v_pages: arrays, or what has their shapes and dtypes.
        device: that it would run on, which may be one of a topology to compile for; None is the first of the default backend.
    """
    device = device or jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability != HOPPER:
        return f"device={device.device_kind}: the kernel is for Hopper GPUs (compute capability {HOPPER})"
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if isinstance(pages, Quantized):
            return f"{name}={pages.kind}: the kernel takes no quantized cache"
        if pages.dtype != q.dtype:
            return f"{name}={pages.dtype}: the kernel takes a cache of the queries' dtype, {q.dtype}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype={q.dtype}: the kernel takes bfloat16 and float16"
    heads, head_dim = q.shape[-2:]
    kv_heads, page_size = k_pages.shape[1:3]
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}: the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    if heads > kv_heads * attention_decode.QUERIES:
        return f"heads={heads}: the kernel takes at most {attention_decode.QUERIES} for each of {kv_heads} kv heads"
    if page_size not in PAGE_SIZES and page_size % PAGE_SIZES[-1]:
        return f"page_size={page_size}: the kernel takes {', '.join(map(str, PAGE_SIZES))} and multiples of {PAGE_SIZES[-1]}"
    return None


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
    pages: int = 0,
    splits: int | None = None,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """One query a sequence, over all of the sequence's tokens.

    Args:
        pages: see `xla.paged_attention_decode`; the kernel reads as many as each sequence has.
        splits: see `attention_decode.paged_attention_decode`; XLA's form has none.
        impl, device: see the module and `supported`.
        The others, and what is returned: see `xla.paged_attention_decode`.

    Raises:
        ValueError: impl="mosaic" where the kernel cannot serve; says why.
    """
    if impl not in ("auto", "mosaic", "xla"):
        raise ValueError(f"impl={impl!r}: one of 'auto', 'mosaic', 'xla'")
    reason = None if impl == "xla" else supported(q, k_pages, v_pages, device=device)
    if impl == "mosaic" and reason is not None:
        raise ValueError(f"impl='mosaic': {reason}")
    if impl == "xla" or reason is not None:
        return xla.paged_attention_decode(
            q, k_pages, v_pages, block_tables, lengths, scale=scale, window=window, soft_cap=soft_cap, pages=pages
        )
    assert not isinstance(k_pages, Quantized) and not isinstance(v_pages, Quantized)  # as supported says
    return attention_decode.paged_attention_decode(
        q, k_pages, v_pages, block_tables, lengths, scale=scale, window=window, soft_cap=soft_cap, splits=splits
    )
