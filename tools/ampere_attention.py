"""Forms of Ampere's attention, cache writes and page copies, and of Blackwell's prompts, to be compiled for
GPUs that are not there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from kernel_facts import ALL, E4M3, Case, cache_of, copy, decode, latent, prefill, with_sinks, write

from pallas_kernels.attention import ampere, blackwell
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache import ampere_write


def ampere_decode(
    head_dim: int,
    page_size: int,
    splits: int,
    *,
    group: int = 4,
    dtype: Any = jnp.bfloat16,
    kind: str = "",
    **ways: Any,
) -> Case:
    """As `decode`; kind: of an eight-bit cache."""
    _, (q, cache, _, *where, _) = decode(head_dim, page_size, group=group, dtype=dtype)
    pages = cache_of(kind, cache.shape, dtype)
    return (
        partial(
            ampere.paged_attention_decode, options=AttentionOptions(head_dim**-0.5, **ways), splits=splits
        ),
        (q, pages, pages, *where),
    )


def ampere_prefill(
    head_dim: int, page_size: int, splits: int, *, dtype: Any = jnp.bfloat16, kind: str = "", **ways: Any
) -> Case:
    """Sixteen tiles of 64 queries, otherwise as `ampere_decode`."""
    _, (q, k, v, tables, lengths) = ampere_decode(head_dim, page_size, splits, dtype=dtype, kind=kind)
    tiles = jax.ShapeDtypeStruct((q.shape[0], 64, *q.shape[1:]), q.dtype)
    function = partial(
        ampere.paged_attention_prefill, options=AttentionOptions(head_dim**-0.5, **ways), splits=splits
    )
    return function, (tiles, k, v, tables, lengths, lengths)


def ampere_latent(heads: int, page_size: int, *, dtype: Any = jnp.bfloat16) -> Case:
    """As `latent`."""
    function, arrays = latent(heads, page_size, dtype=dtype)
    return partial(ampere.latent_attention_decode, **function.keywords), arrays  # type: ignore[attr-defined]


def ampere_latent_prefill(heads: int, page_size: int, *, dtype: Any = jnp.bfloat16) -> Case:
    """Sixteen tiles of 64 queries, otherwise as `ampere_latent`."""
    function, (q, pages, tables, lengths) = ampere_latent(heads, page_size, dtype=dtype)
    tiles = jax.ShapeDtypeStruct((q.shape[0], 64, *q.shape[1:]), q.dtype)
    prefill = partial(ampere.latent_attention_prefill, **function.keywords)  # type: ignore[attr-defined]
    return prefill, (tiles, pages, tables, lengths, lengths)


ampere_writes = partial(write, kernel=ampere_write.kv_write)
AMPERE_CASES: dict[str, Case] = {
    "decode, head dim 64": ampere_decode(64, 64, 4),
    "decode, head dim 128": ampere_decode(128, 64, 4),
    "decode, head dim 256": ampere_decode(256, 64, 4),
    "decode, head dim 128, one split": ampere_decode(128, 64, 1),
    "decode, head dim 128, group 16, float16": ampere_decode(128, 64, 4, group=16, dtype=jnp.float16),
    "decode, head dim 64, pages of 16, window, cap": ampere_decode(64, 16, 4, **ALL),
    "decode, head dim 128, pages of 16, window, cap": ampere_decode(128, 16, 4, **ALL),
    "decode, head dim 256, pages of 16, window, cap": ampere_decode(256, 16, 4, **ALL),
    "decode, head dim 64, sinks": with_sinks(*ampere_decode(64, 64, 1)),
    "prefill, head dim 64": ampere_prefill(64, 64, 1),
    "prefill, head dim 128": ampere_prefill(128, 64, 1),
    "prefill, head dim 256": ampere_prefill(256, 64, 1),
    "prefill, head dim 64, pages of 16, window, cap": ampere_prefill(64, 16, 4, **ALL),
    "prefill, head dim 128, pages of 16, window, cap": ampere_prefill(128, 16, 4, **ALL),
    "prefill, head dim 256, pages of 16, window, cap": ampere_prefill(256, 16, 4, **ALL),
    **{f"decode, int8, head dim {size}": ampere_decode(size, 64, 4, kind="int8") for size in (64, 128, 256)},
    "decode, fp8, head dim 64, pages of 16, window, cap": ampere_decode(64, 16, 4, kind=E4M3, **ALL),
    "decode, fp8, head dim 128, group 16, float16": ampere_decode(
        128, 64, 1, group=16, dtype=jnp.float16, kind=E4M3
    ),
    "prefill, int8, head dim 64": ampere_prefill(64, 64, 1, kind="int8"),
    "prefill, int8, head dim 128, float16": ampere_prefill(128, 64, 1, dtype=jnp.float16, kind="int8"),
    "prefill, fp8, head dim 128, pages of 16, window, cap": ampere_prefill(128, 16, 4, kind=E4M3, **ALL),
    "prefill, fp8, head dim 256": ampere_prefill(256, 64, 1, kind=E4M3),
    "latent decode, 16 heads": ampere_latent(16, 64),
    "latent decode, 128 heads, pages of 16, float16": ampere_latent(128, 16, dtype=jnp.float16),
    "latent prefill, 16 heads": ampere_latent_prefill(16, 64),
    "latent prefill, 128 heads, pages of 16, float16": ampere_latent_prefill(128, 16, dtype=jnp.float16),
    "write, one token, rotated": ampere_writes(1, 128, pairs=64),
    "write, 4096 tokens, rotated, int8": ampere_writes(4096, 128, "int8", pairs=64),
    "write, 64 tokens, normed, rotated in part, head dim 256, fp8": ampere_writes(
        64, 256, E4M3, pairs=32, normed=True
    ),
    "copy, pages of 64": copy("", 64, tma=False),
    "copy, pages of 16, int8": copy("int8", 16, tma=False),
    "copy, pages of 128, fp8": copy(E4M3, 128, tma=False),
}
tcgen05 = partial(prefill, kernel=blackwell.paged_attention_prefill)
BLACKWELL_CASES: dict[str, Case] = {
    "prompts, head dim 64": tcgen05(64, 64),
    "prompts, head dim 128": tcgen05(128, 64),
    "prompts, head dim 256": tcgen05(256, 64),
    "prompts, head dim 128, group 7, float16": tcgen05(128, 64, group=7, dtype=jnp.float16),
    "prompts, head dim 64, pages of 16, window, cap": tcgen05(64, 16, **ALL),
    "prompts, head dim 128, pages of 16, window, cap": tcgen05(128, 16, **ALL),
    "prompts, head dim 256, pages of 16, window, cap": tcgen05(256, 16, **ALL),
    "prompts, head dim 128, pages of 16, tiles of 128": tcgen05(128, 16, tile=128),
    "prompts, head dim 128, tiles of 16": tcgen05(128, 64, tile=16),
    "prompts, head dim 128, int8": tcgen05(128, 64, kind="int8"),
    "prompts, head dim 64, fp8, pages of 16, window, cap": tcgen05(64, 16, kind=E4M3, **ALL),
    "prompts, head dim 128, fp8, pages of 16, window, cap": tcgen05(128, 16, kind=E4M3, **ALL),
    "prompts, head dim 256, fp8": tcgen05(256, 64, kind=E4M3),
    "prompts, head dim 128, window, sinks": with_sinks(*tcgen05(128, 64, window=128)),
    "prompts, head dim 64, group 8, window, sinks": with_sinks(*tcgen05(64, 64, group=8, window=128)),
}
