"""Decode attention by FlashInfer's XQA kernel, on the KV cache in jengine's layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fastest, tuning
from pallas_kernels.flashinfer import build
from pallas_kernels.flashinfer.build import ARCHITECTURES, Kernel
from pallas_kernels.options import PLAIN, AttentionOptions
from pallas_kernels.quantized import Pages, Quantized

DTYPES = ("bfloat16", "float16")
OPTIONS = "window", "sinks"  # besides the scale
HEAD_DIMS, PAGE_SIZES, MOST_GROUP = (64, 128, 256), (16, 32, 64, 128), 32
TILE = 256  # tokens that a thread block computes at a time
ROW_FACTS = 256  # bytes of a part's maxima and sums
NAME = build.NAME


def serves(
    impl: str, q: Any, k_pages: Pages, v_pages: Pages, options: AttentionOptions, device: jax.Device | None
) -> bool:
    """Whether a call uses this kernel: impl is "flashinfer", or impl is "auto" and the kernel was measured to
    be faster.

    Raises:
        ValueError: impl is "flashinfer", and the kernel does not support the call.
    """
    if impl == "auto":
        if isinstance(k_pages, Quantized) or not fastest.takes(
            "flashinfer", _case(q, k_pages), _kind(device)
        ):
            return False
    elif impl != "flashinfer":
        return False
    refused = why_unsupported(q, k_pages, v_pages, options, device=device)
    if refused is not None and impl == "flashinfer":
        raise ValueError(f"impl={impl!r}: {refused}")
    return refused is None


def prepare(impl: str, q: Any, k_pages: Pages, options: AttentionOptions, device: jax.Device | None) -> None:
    """Registers with XLA the kernel that programs may call with these options, for any number of rows.

    Raises:
        ValueError, RuntimeError: see `serves` and `build.register`.
    """
    if impl == "auto" and fastest.takes("flashinfer", None, _kind(device)):
        refused = why_unsupported(q, k_pages, k_pages, options, device=device)
        impl = "flashinfer" if refused is None else impl
    if impl == "flashinfer" and serves(impl, q, k_pages, k_pages, options, device):
        build.register(kernel_for(q, k_pages, options.window, device or jax.devices()[0]))


def why_unsupported(
    q: Any,
    k_pages: Pages,
    v_pages: Pages,
    options: AttentionOptions = PLAIN,
    *,
    device: jax.Device | None = None,
) -> str | None:
    """Why the kernel does not support these arrays and options, or None. It accepts any objects with shapes
    and dtypes.
    """
    device = device or jax.devices()[0]
    if getattr(device, "compute_capability", None) not in ARCHITECTURES:
        return (
            f"device={device.device_kind}: FlashInfer's kernel is for GPUs of compute capability"
            f" {', '.join(ARCHITECTURES)}"
        )
    if isinstance(k_pages, Quantized) or isinstance(v_pages, Quantized):
        return (
            "k_pages=quantized: FlashInfer's kernel takes one scale for the whole cache, and these have one"
            " for each token and kv head"
        )
    if str(q.dtype) not in DTYPES:
        return f"dtype={q.dtype}: FlashInfer's kernel takes {' and '.join(DTYPES)}"
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != q.dtype:
            return f"{name}={pages.dtype}: FlashInfer's kernel takes the queries' dtype, {q.dtype}"
    if (why := options.refused(*OPTIONS, by="FlashInfer's kernel")) is not None:
        return why
    kernel = kernel_for(q, k_pages, options.window, device)
    if kernel.head_dim not in HEAD_DIMS:
        return (
            f"head_dim={kernel.head_dim}: FlashInfer's kernel is built for {', '.join(map(str, HEAD_DIMS))}"
        )
    if kernel.page_size not in PAGE_SIZES:
        return f"page_size={kernel.page_size}: FlashInfer's kernel takes {', '.join(map(str, PAGE_SIZES))}"
    if kernel.group > MOST_GROUP:
        return (
            f"heads={q.shape[-2]}: FlashInfer's kernel takes at most {MOST_GROUP} for each of"
            f" {k_pages.shape[1]} kv heads"
        )
    return build.why_not_built(kernel)


def kernel_for(q: Any, k_pages: Any, window: int | None, device: jax.Device) -> Kernel:
    """The kernel for queries [..., heads, head_dim] over pages [num_pages, kv_heads, page_size, head_dim]."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    return Kernel(
        str(q.dtype),
        page_size,
        head_dim,
        q.shape[-2] // kv_heads,
        window is not None,
        device.compute_capability,
    )


def parts(rows: int, kv_heads: int, tokens: int, cores: int) -> int:
    """Number of parts of a sequence that thread blocks compute in parallel. It must match the kernel's launch
    function.
    """
    return min(max(1, cores // (rows * kv_heads)), -(-tokens // TILE))


def paged_attention_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    device: jax.Device | None = None,
) -> jax.Array:
    """Decode attention; see `xla.paged_attention_decode`. `why_unsupported` gives the supported shapes,
    dtypes and options.

    The number of parts of a sequence depends only on shapes, and parts are joined in order, so a row's result
    does not depend on other rows.

    Raises:
        ValueError: options has a soft cap or slopes.
        RuntimeError: see `build.register`.
    """
    options.require(*OPTIONS)
    window, sinks = options.window, options.sinks
    device = device or jax.devices()[0]
    rows, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    here = lengths > 0
    if window is not None:
        block_tables, lengths = _within(block_tables, lengths, window, page_size)
    width, cores = block_tables.shape[1], tuning.cores(device)
    splits = parts(rows, kv_heads, width * page_size, cores)
    computed = rows * kv_heads * splits if splits > 1 else 0
    workspace = computed * (heads // kv_heads * head_dim * q.dtype.itemsize + ROW_FACTS) + 1024 * (
        computed > 0
    )
    semaphores = jnp.zeros((rows * kv_heads if splits > 1 else 0,), jnp.int32)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(semaphores.shape, semaphores.dtype),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(
        build.register(kernel_for(q, k_pages, window, device)), results, input_output_aliases={6: 1}
    )
    with_sinks = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32).reshape(heads)
    numbers = {"scale": np.float32(options.scale), "window": np.int32(window or 0), "cores": np.int32(cores)}
    out: jax.Array = call(q, k_pages, v_pages, block_tables, lengths, with_sinks, semaphores, **numbers)[0]
    # the kernel joins empty parts to NaN
    return jnp.where(here[:, None, None], out, 0) if splits > 1 else out


def _kind(device: jax.Device | None) -> str:
    return str(getattr(device or jax.devices()[0], "device_kind", ""))


def _case(q: Any, k_pages: Any) -> fastest.Case:
    _, kv_heads, page_size, head_dim = k_pages.shape
    return fastest.Case(str(q.dtype), q.shape[-2], kv_heads, page_size, head_dim, q.shape[0])


def _within(
    block_tables: jax.Array, lengths: jax.Array, window: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """The tables from the window's first page on, and the number of tokens from there.

    The kernel masks scores of tokens before the window and multiplies their values by zero. Pages before the
    window may meanwhile belong to another sequence and contain NaN, so the kernel must not see them.
    """
    first = jnp.maximum(lengths - window, 0) // page_size
    columns = min(block_tables.shape[1], -(-window // page_size) + 1)
    index = first[:, None] + jnp.arange(columns)
    return jnp.take_along_axis(block_tables, index, axis=1, mode="clip"), lengths - first * page_size
