"""From the product of queries, keys and values to rotated queries and a written cache, as a Pallas Mosaic GPU kernel for Hopper.

One block of threads takes one row (a query, the key or the value) of a few tokens and kv heads. TMA brings it to shared memory;
there queries and keys are normed and rotated, and for an eight-bit cache each key and value is quantized; then TMA puts each
token where it belongs, all the block's heads in one copy. Padding is not written to pages, so no two blocks write one place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling

from pallas_kernels.qkv import HeadNorm, Qkv, QkvProduct
from pallas_kernels.quantized import LARGEST, SMALLEST, Pages, Quantized
from pallas_kernels.tuning import BLOCKS, CORES
from pallas_kernels.xla import Queries, Rotation, rotate

TOKENS = 8  # of a block: two for each of its warps
LANES = 32  # of a warp
ALIGNMENT = 128  # bytes, of what TMA copies in shared memory
BLOCK_BYTES = 1 << 14  # of queries, keys or values that a block holds at most, unless one head's are more


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
    """Norm and rotate tokens' queries and keys, and write keys and values into their pages.

    `dispatch.why_kv_write_unsupported` says for what. A QkvProduct is read as it lies. XLA joins what comes apart, and it norms and
    rotates in the same kernel unless there are a multiple of 32 pairs.

    An eight-bit cache has a scale for each token and kv head. That is the finest unit that is written at once: a page takes its
    tokens one by one, and a scale that they shared would have to change under those that are stored already. It costs 4 bytes
    beside head_dim, and multiplies whole scores and weights, not single channels.

    The cache is updated in place where the caller donates it, and what is not written keeps its value. Under `shard_map` this
    needs check_vma=False.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], in qkv's dtype, or Quantized to int8 or to the bits of
            float8_e4m3fn; both of one dtype.
        qkv: bfloat16 or float16. Between norm and rotation, nothing is rounded.
        page_ids, offsets: as in `xla.kv_write`; tokens of the null page are not written.
        rows, rotation: as in `xla.kv_write`.
        cores: multiprocessors of the device, for which there should be blocks of threads.
        interpret: as in `plgpu.kernel`.

    Returns:
        As `xla.kv_write` does; queries of padding are there too.
    """
    if rotation is not None and rotation[0].shape[1] % LANES:
        q, k, v = jax.tree.map(lambda x: x.astype(jnp.float32), qkv).split()
        turned = Qkv(rotate(q, rotation), rotate(k, rotation), v)
        qkv, rotation = jax.tree.map(lambda x: x.astype(qkv.dtype), turned), None
    product = qkv.joined()
    tokens, kv_heads, _, head_dim = product.rows.shape
    group, dtype, some = product.group, product.rows.dtype, min(tokens, TOKENS)
    tiles = pl.cdiv(tokens, TOKENS)
    heads = heads_per_block(tiles * (group + 2), kv_heads, TOKENS * head_dim * dtype.itemsize, cores)
    scratch: dict[str, Any] = {"x_smem": plgpu.SMEM((TOKENS, heads, head_dim), dtype), "x_full": plgpu.Barrier()}
    if rotation is not None:
        angles = plgpu.SMEM((TOKENS, rotation[0].shape[1]), jnp.float32)
        scratch |= {"cos_smem": angles, "sin_smem": angles, "angles_full": plgpu.Barrier(num_arrivals=2)}
    if isinstance(k_pages, Quantized):
        aligned = pl.cdiv(heads * head_dim, ALIGNMENT) * ALIGNMENT // head_dim  # heads: where a token begins, TMA can read
        scratch["stored_smem"] = plgpu.SMEM((TOKENS, aligned, head_dim), k_pages.values.dtype)
        scratch["scale_smem"] = plgpu.SMEM((heads, TOKENS), jnp.float32)
    cache: tuple[Pages, Pages] = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    q = plgpu.kernel(
        partial(_kernel, group=group, tokens=some),
        out_type=[jax.ShapeDtypeStruct((n, kv_heads, group, head_dim), dtype) for n in (rows, tokens - rows) if n],
        scratch_types=scratch,
        grid=(group + 2, kv_heads // heads, tiles),
        grid_names=("row", "part", "tile"),
        kernel_name="kv_write",
        interpret=interpret,
    )(cache, product.rows, page_ids, offsets, rotation, product.norm)
    written: tuple[Pages, Pages] = jax.tree.map(jax.freeze, cache)
    apart = [x.reshape(-1, kv_heads * group, head_dim) for x in q]
    none = jnp.zeros((0, kv_heads * group, head_dim), dtype)
    return (apart[0] if rows else none, apart[-1] if rows < tokens else none), written


def heads_per_block(tiles: int, kv_heads: int, head_bytes: int, cores: int) -> int:
    """As many as make large copies, while there are blocks for every multiprocessor and shared memory for several blocks.

    Args:
        tiles: of all rows.
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
    start = jnp.minimum(tile * TOKENS, product.shape[0] - tokens)  # the last blocks may share tokens
    these, some, filled = pl.ds(start, tokens), pl.ds(part * heads, heads), pl.ds(0, tokens)
    plgpu.copy_gmem_to_smem(product.at[these, some, row], x_smem.at[filled], x_full)

    def turn(weight: Any) -> None:
        """Norms and rotates what is in shared memory; what lies beside the block's tokens there is never written."""
        angles: list[jax.Array] = []
        pairs = 0 if rotation is None else cos_smem.shape[1]
        layout = _layout(math.gcd(pairs, x_smem.shape[2]))
        if rotation is not None:
            for side, smem in zip(rotation, (cos_smem, sin_smem), strict=True):
                plgpu.copy_gmem_to_smem(side.at[these], smem.at[filled], angles_full)
            plgpu.barrier_wait(angles_full)
            angles = [plgpu.load(smem, layout=layout) for smem in (cos_smem, sin_smem)]
        plgpu.barrier_wait(x_full)
        if rotation is not None or norm is not None:
            pl.loop(0, heads)(lambda head: _turn(x_smem.at[:, head], pairs, angles, weight, norm, layout))

    def each(put: Callable[[int, jax.Array], None]) -> None:
        """Of the tokens that the block before does not write already."""
        plgpu.commit_smem()
        for i in range(tokens):
            pl.when(start + i >= tile * TOKENS)(partial(put, i, start + i))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write(pages: Any) -> None:
        if scale_smem is not None:

            @pl.loop(0, heads)
            def _(head: jax.Array) -> None:
                stored_smem[:, head], scale_smem[head] = _quantized(x_smem.at[:, head], pages.kind)

        def put(i: int, token: jax.Array) -> None:
            page, offset = page_ids[token], offsets[token]
            pl.when(page > 0)(partial(store, i, pages, page, offset))

        each(put)

    def put_query(i: int, token: jax.Array) -> None:
        first = 0
        for ref in queries:
            here, first = token - first, first + ref.shape[0]
            mine = (here >= 0) & (here < ref.shape[0])
            pl.when(mine)(partial(plgpu.copy_smem_to_gmem, x_smem.at[i], ref.at[here, some, row]))

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
        each(put_query)

    @pl.when(row == group)
    def _() -> None:
        turn(None if norm is None else norm.k)
        write(cache[0])

    @pl.when(row == group + 1)
    def _() -> None:
        plgpu.barrier_wait(x_full)
        write(cache[1])


def _turn(x: Any, pairs: int, angles: Sequence[jax.Array], weight: Any, norm: HeadNorm | None, layout: Any) -> None:
    """Norms and rotates a head's [TOKENS, head_dim] where it lies, as `qkv.rms_norm` and `xla.rotate` do."""
    borders = sorted({0, pairs, 2 * pairs, x.shape[1]})
    places = [pl.ds(start, end - start) for start, end in itertools.pairwise(borders)]
    parts = [plgpu.load(x.at[:, place], layout=layout).astype(jnp.float32) for place in places]
    if norm is not None:
        squares = [(part * part).sum(axis=1) for part in parts]
        factor = lax.rsqrt(sum(squares[1:], squares[0]) / x.shape[1] + norm.eps)
        for i, (place, part) in enumerate(zip(places, parts, strict=True)):
            own = plgpu.load(weight.at[place], layout=layout.reduce(0), optimized=False).astype(jnp.float32) + norm.offset
            parts[i] = part * lax.broadcast_in_dim(factor, part.shape, [0]) * lax.broadcast_in_dim(own, part.shape, [1])
    if angles:
        (cos, sin), (first, second) = angles, parts[:2]
        parts[:2] = first * cos - second * sin, second * cos + first * sin
    for place, part in zip(places, parts if norm is not None else parts[:2], strict=False):
        x[:, place] = part.astype(x.dtype)


def _quantized(x: Any, kind: str) -> tuple[jax.Array, jax.Array]:
    """The rows [TOKENS, head_dim] of a head as `quantized.quantize` has them: numbers, or the bits of fp8, and their scales."""
    wide = _rows(x).astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=1), SMALLEST) / LARGEST[jnp.dtype(kind)]
    values = wide / lax.broadcast_in_dim(scale, wide.shape, [0])
    if kind == "int8":
        return jnp.round(values).astype(jnp.int8), scale
    return lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8), scale


def _rows(x: Any) -> jax.Array:
    """x [TOKENS, n * LANES]."""
    loaded: jax.Array = plgpu.load(x, layout=_layout(x.shape[1]))
    return loaded


def _layout(columns: int) -> Any:
    """Of [TOKENS, a multiple of these columns]: each row in one warp, whose threads have what lies side by side."""
    width = 2 if columns % (2 * LANES) == 0 else 1
    tiles = Tiling(((4, LANES * width), (width,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
