"""Chooses the implementation of latent attention, in which all heads share one cached vector per token.

See `dispatch` for `impl` and `device`. Hopper has a kernel for decoding. Elsewhere, and for prompts, the
vectors are passed to ordinary attention as keys and as values of a single kv head. A CPU has kernels for
that; on a GPU it is computed by XLA, since kernels take head dims up to 256.
"""

from __future__ import annotations

import jax

from pallas_kernels.attention import dispatch
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.attention.work_list import WorkList
from pallas_kernels.cache.support import PAGE_SIZES
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import DTYPES, HOPPER, Impl, capability, kernel_serves, on_cpu


def why_latent_decode_unsupported(
    q: jax.Array,
    pages: Pages,
    options: AttentionOptions = PLAIN,
    *,
    rank: int,
    device: jax.Device | None = None,
) -> str | None:
    """Why no kernel for `latent_attention_decode` supports these arrays and options, or None."""
    if capability(device) not in HOPPER:
        return dispatch.why_decode_unsupported(q, pages, pages, options, device=device)
    if (why := options.refused()) is not None:
        return why
    if str(q.dtype) not in DTYPES:
        return f"dtype={q.dtype}: the kernel takes {' and '.join(DTYPES)}"
    if isinstance(pages, Quantized):
        return f"pages={pages.kind}: the kernel takes no quantized cache"
    if pages.dtype != q.dtype:
        return f"pages={pages.dtype}: the kernel takes the queries' dtype, {q.dtype}"
    from pallas_kernels.attention.hopper.latent import KEY_CHANNELS, RANKS

    page_size, key_dim = pages.shape[2:]
    if rank not in RANKS:
        return f"rank={rank}: the kernel takes {', '.join(map(str, RANKS))}"
    if key_dim % KEY_CHANNELS or not rank <= key_dim <= RANKS[-1] + KEY_CHANNELS:
        return (
            f"key_dim={key_dim}: the kernel takes multiples of {KEY_CHANNELS} from rank to"
            f" {RANKS[-1] + KEY_CHANNELS}"
        )
    if page_size not in PAGE_SIZES and page_size % PAGE_SIZES[-1]:
        return (
            f"page_size={page_size}: the kernel takes {', '.join(map(str, PAGE_SIZES))} and multiples of"
            f" {PAGE_SIZES[-1]}"
        )
    return None


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
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    refused = why_latent_decode_unsupported(q, pages, options, rank=rank, device=device)
    where = block_tables, lengths
    if kernel_serves(impl, refused, device) and not on_cpu(device):
        from pallas_kernels.attention.hopper import latent as latent_decode

        assert not isinstance(pages, Quantized)
        device = device or jax.devices()[0]
        return latent_decode.latent_attention_decode(
            q, pages, *where, options, rank=rank, work=work, device=device
        )
    out = dispatch.paged_attention_decode(
        q, pages, pages, *where, options, pages=most_pages, impl=impl, device=device
    )
    return out[..., :rank]


def latent_decode_work(
    heads: int, lengths: jax.Array, *, device: jax.Device | None = None
) -> WorkList | None:
    """The work list of `latent_attention_decode` for all layers with this many query heads and these lengths.

    Returns:
        None if the device has no kernel that uses a work list.
    """
    if capability(device) not in HOPPER:
        return None
    from pallas_kernels.attention.hopper.latent import latent_work

    return latent_work(heads, lengths, device=device or jax.devices()[0])


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
    """
    where = block_tables, positions, lengths
    out = dispatch.paged_attention_prefill(q, pages, pages, *where, options, pages=most_pages, device=device)
    return out[..., :rank]
