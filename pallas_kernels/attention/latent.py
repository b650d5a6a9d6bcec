"""Chooses the implementation of latent attention, in which all heads share one cached vector per token.

See `dispatch` for `impl` and `device`. GPUs have kernels for decoding, and all but Hopper for prompts.
Elsewhere the vectors are passed to ordinary attention as keys and as values of a single kv head. A CPU has
kernels for that; on a GPU it is computed by XLA, since kernels take head dims up to 256.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.attention import dispatch
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.support import KEY_CHANNELS, RANKS
from pallas_kernels.attention.work_list import WorkList
from pallas_kernels.cache.support import why_page_size_unsupported
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import AMPERE, CPU, HOPPER, Impl, Implementation, choose, lazy, why_no_dtype


def _why_no_gpu_latent(q: Any, pages: Pages, options: AttentionOptions, rank: int) -> str | None:
    if (refused := options.refused() or why_no_dtype(q)) is not None:
        return refused
    if isinstance(pages, Quantized):
        return f"pages={pages.kind}: the kernel takes no quantized cache"
    if pages.dtype != q.dtype:
        return f"pages={pages.dtype}: the kernel takes the queries' dtype, {q.dtype}"
    page_size, key_dim = pages.shape[2:]
    if rank not in RANKS:
        return f"rank={rank}: the kernel takes {', '.join(map(str, RANKS))}"
    if key_dim % KEY_CHANNELS or not rank <= key_dim <= RANKS[-1] + KEY_CHANNELS:
        return (
            f"key_dim={key_dim}: the kernel takes multiples of {KEY_CHANNELS} from rank to"
            f" {RANKS[-1] + KEY_CHANNELS}"
        )
    return why_page_size_unsupported(page_size)


def _as_ordinary(kernel: Implementation) -> Implementation:
    """Ordinary attention's kernel, with the vectors as keys and values."""

    def why_not(q: jax.Array, pages: Pages, options: AttentionOptions, rank: int) -> str | None:
        return kernel.why_not(q, pages, pages, options)

    def run(q: jax.Array, pages: Pages, *args: Any, rank: int, **extra: Any) -> Any:
        return kernel.run(q, pages, pages, *args, **extra)[..., :rank]

    return Implementation(kernel.target, why_not, run)


LATENT_DECODE = (
    Implementation(HOPPER, _why_no_gpu_latent, lazy("attention.hopper.latent", "latent_attention_decode")),
    Implementation(
        AMPERE, _why_no_gpu_latent, lazy("attention.ampere", "latent_attention_decode", "work", "device")
    ),
    *(_as_ordinary(kernel) for kernel in dispatch.DECODE if kernel.target is CPU),
)
LATENT_PREFILL = (
    Implementation(
        AMPERE, _why_no_gpu_latent, lazy("attention.ampere", "latent_attention_prefill", "until", "device")
    ),
    *(_as_ordinary(kernel) for kernel in dispatch.PREFILL if kernel.target is CPU),
)
LATENT_DECODE_WORK = (Implementation(HOPPER, lambda: None, lazy("attention.hopper.latent", "latent_work")),)


def latent_attention_decode(
    q: jax.Array,
    pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    rank: int,
    most_pages: int = 0,
    work: WorkList | None = None,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """Attends from one query per sequence to all tokens of the sequence.

    Args:
        q: [rows, heads, key_dim].
        pages: [num_pages, 1, page_size, key_dim]; a value is the first `rank` channels of its key.
        block_tables, lengths, options: see `dispatch.paged_attention_decode`.
        most_pages: `pages` of `dispatch.paged_attention_decode`.
        work: from `latent_decode_work`, for Hopper's kernel; None creates one for this call. Other
            implementations need none.

    Returns:
        [rows, heads, rank], in q's dtype.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and no such kernel supports the call.
    """
    where = block_tables, lengths
    kernel = choose(LATENT_DECODE, impl, device, q, pages, options, rank)
    if kernel is None:
        choice: Any = {"pages": most_pages, "impl": impl, "device": device}
        return dispatch.paged_attention_decode(q, pages, pages, *where, options, **choice)[..., :rank]
    extra = {"rank": rank, "work": work, "device": device or jax.devices()[0]}
    out: jax.Array = kernel.call("latent_attention_decode", q, pages, *where, options, **extra)
    return out


def latent_decode_work(
    heads: int, lengths: jax.Array, *, device: jax.Device | None = None
) -> WorkList | None:
    """The work list of `latent_attention_decode` for all layers with this many query heads and these lengths.

    Returns:
        None if the device has no kernel that uses a work list.
    """
    kernel = choose(LATENT_DECODE_WORK, "auto", device)
    if kernel is None:
        return None
    work: WorkList = kernel.run(heads, lengths, device=device or jax.devices()[0])
    return work


def latent_attention_prefill(
    q: jax.Array,
    pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    rank: int,
    most_pages: int = 0,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """Causal attention from tiles of consecutive queries, each of one sequence, to the tokens in the
    sequence's pages.

    Args:
        q: [tiles, tile, heads, key_dim].
        pages, options, rank, most_pages: see `latent_attention_decode`.
        The others: see `xla.paged_attention_prefill`.

    Returns:
        [tiles, tile, heads, rank], in q's dtype.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and no such kernel supports the call.
    """
    where = block_tables, positions, lengths
    kernel = choose(LATENT_PREFILL, impl, device, q, pages, options, rank)
    if kernel is None:
        choice: Any = {"pages": most_pages, "impl": impl, "device": device}
        return dispatch.paged_attention_prefill(q, pages, pages, *where, options, **choice)[..., :rank]
    extra = {"rank": rank, "until": None, "device": device or jax.devices()[0]}
    out: jax.Array = kernel.call("latent_attention_prefill", q, pages, *where, options, **extra)
    return out
