"""Chooses the implementation of a function by device, dtype and shape: a kernel if one supports them,
otherwise XLA.

`impl` is "auto", "mosaic" (GPU kernels), "llvm" (CPU kernels) or "xla". An implementation requested by name
is used or rejected, never replaced. Beside each function there is one that returns why the device's kernel
does not support some arrays, or None if it does. It accepts arrays, or any objects with shapes and dtypes.

`device` is the device that the function will run on, or a device of a topology to compile for; None is the
first device of the default backend. Modules of GPU kernels are imported on first use, because importing
Mosaic takes a third of a second.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import devices
from pallas_kernels.attention import xla
from pallas_kernels.attention.options import PLAIN, AttentionOptions
from pallas_kernels.attention.support import why_no_cpu_attention, why_no_gpu_attention
from pallas_kernels.attention.work_list import WorkList, decode_blocks, even_work, fixed_work, most_rows
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import AMPERE, HOPPER, Impl, capability, kernel_serves, on_cpu


def why_decode_unsupported(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    options: AttentionOptions = PLAIN,
    *,
    device: jax.Device | None = None,
) -> str | None:
    """Why the kernel for `paged_attention_decode` does not support these arrays and options, or None."""
    if on_cpu(device):
        return devices.cpu_refused() or why_no_cpu_attention(k_pages, v_pages, options)
    heads, kv_heads = q.shape[-2], k_pages.shape[1]
    if capability(device) in HOPPER:
        from pallas_kernels.attention.hopper.decode import QUERIES

        if heads > QUERIES * kv_heads:
            return f"heads={heads}: the kernel takes at most {QUERIES} for each of {kv_heads} kv heads"
    return why_no_gpu_attention(q, k_pages, v_pages, options, device)


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    pages: int = 0,
    work: WorkList | None = None,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """Attends from one query per sequence to all tokens of the sequence.

    Args:
        options: see `AttentionOptions`.
        pages: see `xla.paged_attention_decode`. Kernels need no such limit: they read as many as each
            sequence has.
        work: from `decode_work`, for Hopper's kernel; None creates one for this call. Other implementations
            need none.
        impl, device: see the module.
        The others, and the result: see `xla.paged_attention_decode`.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    where = block_tables, lengths
    refused = why_decode_unsupported(q, k_pages, v_pages, options, device=device)
    if not kernel_serves(impl, refused, device):
        return xla.paged_attention_decode(q, k_pages, v_pages, *where, options, pages=pages)
    if on_cpu(device):
        from pallas_kernels.attention.cpu import attention

        return attention.paged_attention_decode(q, k_pages, v_pages, *where, options)
    if capability(device) in AMPERE:
        from pallas_kernels.attention import ampere

        return ampere.paged_attention_decode(q, _plain(k_pages), _plain(v_pages), *where, options)
    from pallas_kernels.attention.hopper import decode as attention_decode

    device = device or jax.devices()[0]
    return attention_decode.paged_attention_decode(
        q, k_pages, v_pages, *where, options, work=work, device=device
    )


def decode_work(
    k_pages: Pages,
    lengths: jax.Array,
    *,
    tokens: int,
    heads: int,
    owners: jax.Array | None = None,
    window: int | None = None,
    batch_invariant: bool = False,
    device: jax.Device | None = None,
) -> WorkList | None:
    """The work list of `paged_attention_decode` for all layers with such pages, lengths and window.

    Args:
        lengths: int32 [rows], as in `paged_attention_decode`.
        tokens: the maximum length.
        heads: number of query heads.
        owners: int32 [rows], the sequence of each row. Rows that follow each other in the batch and in a
            sequence, which have the same block table, read its pages together. None: no row has the sequence
            of another.
        batch_invariant: split sequences so that a row's result does not depend on the other rows.

    Returns:
        None if the device has no kernel that uses a work list.
    """
    if capability(device) not in HOPPER:
        return None
    kv_heads, _, head_dim = k_pages.shape[1:]
    stored = k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype
    blocks = decode_blocks(str(stored), head_dim, device or jax.devices()[0])
    together = 1 if owners is None else most_rows(heads // kv_heads, len(lengths))
    how: dict[str, Any] = {"blocks": blocks, "window": window, "owners": owners, "most_rows": together}
    return (
        fixed_work(lengths, kv_heads, tokens=tokens, **how)
        if batch_invariant
        else even_work(lengths, kv_heads, **how)
    )


def why_prefill_unsupported(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    options: AttentionOptions = PLAIN,
    *,
    ahead: bool = False,
    device: jax.Device | None = None,
) -> str | None:
    """Why the kernel for `paged_attention_prefill` does not support these arrays and options, or None.

    Args:
        ahead: whether queries may see later tokens.
    """
    if on_cpu(device):
        return devices.cpu_refused() or why_no_cpu_attention(k_pages, v_pages, options)
    refused = why_no_gpu_attention(q, k_pages, v_pages, options, device)
    if ahead and capability(device) in AMPERE:
        return refused or "until: this kernel is causal"
    if refused is None and capability(device) in HOPPER:
        from pallas_kernels.attention.hopper.prefill import TILE_GRID

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
    options: AttentionOptions,
    *,
    pages: int = 0,
    until: jax.Array | None = None,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """Causal attention from tiles of consecutive queries, each of one sequence, to the tokens in the
    sequence's pages.

    Args:
        options, pages, impl, device: as in `paged_attention_decode`.
        The others, and the result: see `xla.paged_attention_prefill`.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    where = block_tables, positions, lengths
    refused = why_prefill_unsupported(q, k_pages, v_pages, options, ahead=until is not None, device=device)
    if until is not None and options.slopes is not None:
        refused = "until: not with slopes, which take no distance to later tokens"
    if not kernel_serves(impl, refused, device):
        return xla.paged_attention_prefill(q, k_pages, v_pages, *where, options, pages=pages, until=until)
    if on_cpu(device):
        from pallas_kernels.attention.cpu import attention

        return attention.paged_attention_prefill(q, k_pages, v_pages, *where, options, until)
    if capability(device) in AMPERE:
        from pallas_kernels.attention import ampere

        return ampere.paged_attention_prefill(q, _plain(k_pages), _plain(v_pages), *where, options)
    from pallas_kernels.attention.hopper import prefill as attention_prefill

    device = device or jax.devices()[0]
    return attention_prefill.paged_attention_prefill(
        q, k_pages, v_pages, *where, options, until=until, device=device
    )


def _plain(pages: Pages) -> jax.Array:
    """The pages, which are not Quantized: the support function has checked it."""
    assert not isinstance(pages, Quantized)
    return pages
