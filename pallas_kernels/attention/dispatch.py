"""Chooses the implementation of attention by device, dtype and shape: a kernel if one supports them, or else
XLA. DECODE and PREFILL are the tables, see `targets`.

`impl` is "auto", "mosaic" (GPU kernels), "llvm" (CPU kernels) or "xla". An implementation requested by name
is used or rejected, never replaced. `targets.why_none(DECODE, device, q, k_pages, v_pages, options)` says why
no kernel supports a call with arrays, or any objects with shapes and dtypes.

`device` is the device that the function will run on, or a device of a topology to compile for; None is the
first device of the default backend.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.attention import xla
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.support import (
    TILE_GRID,
    why_no_ampere_attention,
    why_no_cpu_attention,
    why_no_gpu_attention,
)
from pallas_kernels.attention.work_list import (
    QUERIES,
    WorkList,
    decode_blocks,
    even_work,
    fixed_work,
    most_rows,
)
from pallas_kernels.quantization.quantized import Pages
from pallas_kernels.targets import AMPERE, BLACKWELL, CPU, HOPPER, Impl, Implementation, choose, lazy


def _why_no_hopper_decode(q: Any, k_pages: Pages, v_pages: Pages, options: AttentionOptions) -> str | None:
    heads, kv_heads = q.shape[-2], k_pages.shape[1]
    if heads > QUERIES * kv_heads:
        return f"heads={heads}: the kernel takes at most {QUERIES} for each of {kv_heads} kv heads"
    return why_no_gpu_attention(q, k_pages, v_pages, options)


def _why_no_hopper_prefill(
    q: Any, k_pages: Pages, v_pages: Pages, options: AttentionOptions, ahead: bool = False
) -> str | None:
    if (refused := why_no_gpu_attention(q, k_pages, v_pages, options)) is not None:
        return refused
    return f"tile={q.shape[1]}: the kernel takes multiples of {TILE_GRID}" if q.shape[1] % TILE_GRID else None


def _hopper_decode_work(
    k_pages: Pages, lengths: jax.Array, tokens: int | None, device: jax.Device, **grouping: Any
) -> WorkList:
    kv_heads, grouping["blocks"] = k_pages.shape[1], decode_blocks(k_pages, device)
    if tokens is None:
        return even_work(lengths, kv_heads, **grouping)
    return fixed_work(lengths, kv_heads, tokens=tokens, **grouping)


_DECODE, _PREFILL = "paged_attention_decode", "paged_attention_prefill"
DECODE = (
    Implementation(HOPPER, _why_no_hopper_decode, lazy("attention.hopper.decode", _DECODE)),
    Implementation(AMPERE, why_no_ampere_attention, lazy("attention.ampere", _DECODE, "work", "device")),
    Implementation(CPU, why_no_cpu_attention, lazy("attention.cpu.attention", _DECODE, "work", "device")),
)
DECODE_WORK = (Implementation(HOPPER, lambda: None, _hopper_decode_work),)  # of kernels that need a list
PREFILL = (
    Implementation(BLACKWELL, _why_no_hopper_prefill, lazy("attention.blackwell", _PREFILL)),
    Implementation(HOPPER, _why_no_hopper_prefill, lazy("attention.hopper.prefill", _PREFILL)),
    Implementation(AMPERE, why_no_ampere_attention, lazy("attention.ampere", _PREFILL, "until", "device")),
    Implementation(CPU, why_no_cpu_attention, lazy("attention.cpu.attention", _PREFILL, "device")),
)


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
        ValueError: impl is "mosaic" or "llvm", and no such kernel supports the call.
    """
    arrays = q, k_pages, v_pages, block_tables, lengths
    kernel = choose(DECODE, impl, device, q, k_pages, v_pages, options)
    if kernel is None:
        return xla.paged_attention_decode(*arrays, options, pages=pages)
    device = device or jax.devices()[0]
    out: jax.Array = kernel.call("paged_attention_decode", *arrays, options, work=work, device=device)
    return out


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
    kernel = choose(DECODE_WORK, "auto", device)
    if kernel is None:
        return None
    together = 1 if owners is None else most_rows(heads // k_pages.shape[1], len(lengths))
    grouping = {"window": window, "owners": owners, "most_rows": together}
    at = device or jax.devices()[0]
    work: WorkList = kernel.run(k_pages, lengths, tokens if batch_invariant else None, at, **grouping)
    return work


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
        ValueError: impl is "mosaic" or "llvm", and no such kernel supports the call.
    """
    arrays = q, k_pages, v_pages, block_tables, positions, lengths
    kernel = choose(PREFILL, impl, device, q, k_pages, v_pages, options, until is not None)
    if kernel is None:
        return xla.paged_attention_prefill(*arrays, options, pages=pages, until=until)
    device = device or jax.devices()[0]
    out: jax.Array = kernel.call("paged_attention_prefill", *arrays, options, until=until, device=device)
    return out
