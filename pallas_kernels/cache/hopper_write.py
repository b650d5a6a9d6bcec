"""Norm and rotation of queries and keys, and the write to the KV cache, as one Pallas Mosaic GPU kernel for
Hopper.

A thread block processes one row (a query, the key or the value) of a few tokens and kv heads. TMA copies it
to shared memory. There, queries and keys are normalized and rotated; for an eight-bit cache, keys and values
are quantized. Then TMA copies each token, all of the block's heads at once, to the queries' array or to its
page. Padding is not written to pages, so no two blocks write to the same place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.rows import (
    TOKENS,
    joined,
    layout_of,
    normalized,
    parts_of,
    queries_of,
    query_types,
    rotated,
    scaled,
)
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import BLOCKS, CORES

ALIGNMENT = 128  # bytes; TMA's source in shared memory must be aligned to this
# maximum bytes of queries, keys or values per thread block, unless a single head needs more
BLOCK_BYTES = 1 << 14


def kv_write(
    k_pages: Pages,
    v_pages: Pages,
    qkv: Qkv | QkvProduct,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    rows: int,
    rotation: Rotation | None = None,
    cores: int = CORES,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Queries, tuple[Pages, Pages]]:
    """Normalizes and rotates queries and keys, and writes keys and values to their pages.

    `support.why_no_gpu_write` gives the supported shapes and dtypes. A QkvProduct is read in place.
    XLA concatenates a Qkv first. If the number of pairs is not a multiple of 32, XLA also normalizes and
    rotates, in the same fusion.

    An eight-bit cache has a scale for each token and kv head, the finest unit that is written at once: tokens
    are added to a page one by one, so a shared scale would have to change for tokens that are already stored.
    A scale takes 4 bytes for head_dim numbers, and multiplies whole scores and weights, not single channels.

    The cache is updated in place if the caller donates it; other tokens are unchanged. Under `shard_map`,
    this needs check_vma=False.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], in qkv's dtype, or Quantized to int8 or
            to the bits of float8_e4m3fn; both of one dtype.
        qkv: bfloat16 or float16. The result of the norm is not rounded before the rotation.
        page_ids, offsets: as in `cache.xla.kv_write`; tokens of the null page are not written.
        rows, rotation: as in `cache.xla.kv_write`.
        cores: multiprocessors of the device, which determine the number of thread blocks.
        interpret: as in `plgpu.kernel`.

    Returns:
        As `cache.xla.kv_write`, including the queries of padding.
    """
    product, rotation = joined(qkv, rotation)
    tokens, kv_heads, _, head_dim = product.rows.shape
    group, dtype, some = product.group, product.rows.dtype, min(tokens, TOKENS)
    tiles = pl.cdiv(tokens, TOKENS)
    heads = heads_per_block(tiles * (group + 2), kv_heads, TOKENS * head_dim * dtype.itemsize, cores)
    pairs = 0 if rotation is None else rotation[0].shape[1]
    scratch: dict[str, Any] = {
        "x_smem": _in_order((TOKENS, heads, head_dim), dtype, pairs),
        "x_full": plgpu.Barrier(),
    }
    if rotation is not None:
        angles = _in_order((TOKENS, pairs), jnp.float32)
        scratch |= {"cos_smem": angles, "sin_smem": angles, "angles_full": plgpu.Barrier(num_arrivals=2)}
    if isinstance(k_pages, Quantized):
        # heads, padded so that TMA can read at each token
        aligned = pl.cdiv(heads * head_dim, ALIGNMENT) * ALIGNMENT // head_dim
        scratch["stored_smem"] = _in_order((TOKENS, aligned, head_dim), k_pages.values.dtype)
        scratch["scale_smem"] = plgpu.SMEM((heads, TOKENS), jnp.float32)
    cache: tuple[Pages, Pages] = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    q = plgpu.kernel(
        partial(_kernel, group=group, tokens=some),
        out_type=query_types(product, rows),
        scratch_types=scratch,
        grid=(group + 2, kv_heads // heads, tiles),
        grid_names=("row", "part", "tile"),
        kernel_name="kv_write",
        interpret=interpret,
    )(cache, product.rows, page_ids, offsets, rotation, product.norm)
    written: tuple[Pages, Pages] = jax.tree.map(jax.freeze, cache)
    return queries_of(q, rows), written


def heads_per_block(tiles: int, kv_heads: int, head_bytes: int, cores: int) -> int:
    """The most heads for which there are enough thread blocks for every multiprocessor, and shared memory for
    several thread blocks on each.

    Args:
        tiles: number of tiles of TOKENS tokens, over all rows.
    """
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n * head_bytes <= BLOCK_BYTES]
    return max((n for n in fitting if tiles * (kv_heads // n) >= BLOCKS * cores), default=1)


def _kernel(
    cache: Any, product: Any, page_ids: Any, offsets: Any, rotation: Any, norm: Any, *queries: Any,
    x_smem: Any, x_full: Any, cos_smem: Any = None, sin_smem: Any = None, angles_full: Any = None,
    stored_smem: Any = None, scale_smem: Any = None, group: int, tokens: int,
) -> None:  # fmt: skip
    heads = x_smem.shape[1]
    row, part, tile = (lax.axis_index(name) for name in ("row", "part", "tile"))
    start = jnp.minimum(tile * TOKENS, product.shape[0] - tokens)  # the last two blocks may overlap
    these, some, filled = pl.ds(start, tokens), pl.ds(part * heads, heads), pl.ds(0, tokens)
    plgpu.copy_gmem_to_smem(product.at[these, some, row], x_smem.at[filled], x_full)

    def turn(weight: Any) -> None:
        """Normalizes and rotates x_smem in place. Its rows without a token are undefined and not copied."""
        head_dim, pairs = x_smem.shape[2], 0 if rotation is None else cos_smem.shape[1]
        layout, places = layout_of(pairs, head_dim), parts_of(pairs, head_dim)
        angles, factors = list[jax.Array](), list[jax.Array]()
        if rotation is not None:
            for side, smem in zip(rotation, (cos_smem, sin_smem), strict=True):
                plgpu.copy_gmem_to_smem(side.at[these], smem.at[filled], angles_full)
        if norm is not None:
            weights = (
                plgpu.load(weight.at[place], layout=layout.reduce(0), optimized=False) for place in places
            )
            factors = [factor.astype(jnp.float32) + norm.offset for factor in weights]
        if rotation is not None:
            plgpu.barrier_wait(angles_full)
            angles = [plgpu.load(smem, layout=layout) for smem in (cos_smem, sin_smem)]
        plgpu.barrier_wait(x_full)
        if norm is None:
            places = places[:2] if pairs else []  # the other parts do not change

        def one(head: jax.Array) -> None:
            x = x_smem.at[:, head]
            parts = [plgpu.load(x.at[:, place], layout=layout).astype(jnp.float32) for place in places]
            if norm is not None:
                parts = normalized(parts, factors, norm.eps, layout)
            if angles:
                parts = rotated(parts, angles)
            for place, part in zip(places, parts, strict=True):
                x[:, place] = part.astype(x.dtype)

        if places:
            pl.loop(0, heads)(one)

    def copy(put: Callable[[int], None]) -> None:
        """Calls put for each token that the previous block does not copy."""
        plgpu.commit_smem()
        for i in range(tokens):
            pl.when(start + i >= tile * TOKENS)(partial(put, i))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def put_query(i: int) -> None:
        first = 0
        for ref in queries:
            token, first = start + i - first, first + ref.shape[0]
            here = (token >= 0) & (token < ref.shape[0])
            pl.when(here)(partial(plgpu.copy_smem_to_gmem, x_smem.at[i], ref.at[token, some, row]))

    def write(pages: Any, prepare: Callable[[], None]) -> None:
        places = [(page_ids[start + i], offsets[start + i]) for i in range(tokens)]  # before anything waits
        prepare()
        if scale_smem is not None:

            @pl.loop(0, heads)
            def _(head: jax.Array) -> None:
                stored_smem[:, head], scale_smem[head] = _quantized(x_smem.at[:, head], pages.kind)

        copy(lambda i: pl.when(places[i][0] > 0)(partial(store, i, pages, *places[i])))

    def store(i: int, pages: Any, page: jax.Array, offset: jax.Array) -> None:
        if scale_smem is None:
            plgpu.copy_smem_to_gmem(x_smem.at[i], pages.at[page, some, offset])
            return
        plgpu.copy_smem_to_gmem(stored_smem.at[i, pl.ds(0, heads)], pages.values.at[page, some, offset])
        for head in range(heads):
            pages.scale[page, part * heads + head, offset] = scale_smem[head, i]

    @pl.when(row < group)
    def _() -> None:
        turn(None if norm is None else norm.q)
        copy(put_query)

    pl.when(row == group)(partial(write, cache[0], partial(turn, None if norm is None else norm.k)))
    pl.when(row == group + 1)(partial(write, cache[1], partial(plgpu.barrier_wait, x_full)))


def _quantized(x: Any, kind: str) -> tuple[jax.Array, jax.Array]:
    """Quantizes a head's rows [TOKENS, head_dim] like `quantized.quantize`. Returns int8, or the bits of fp8,
    and the scales.
    """
    layout = layout_of(0, x.shape[1])
    [values], scale = scaled([plgpu.load(x, layout=layout).astype(jnp.float32)], kind, layout)
    if kind == "int8":
        return jnp.round(values).astype(jnp.int8), scale
    return lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8), scale


def _in_order(shape: tuple[int, ...], dtype: Any, pairs: int = 0) -> Any:
    """Shared memory in row-major order. Slices of its last dimension are of multiples of gcd(pairs, its size)
    numbers.

    Without transforms, Mosaic would choose tiles of fewer than 8 rows, swizzled, of which registers cannot
    use slices: see `tools/swizzle_check.py`. Warps read whole rows here, so they need no swizzle.
    """
    tiles = plgpu.TilingTransform((math.gcd(pairs, shape[-1]),))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles,))
