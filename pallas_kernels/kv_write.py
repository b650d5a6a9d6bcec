"""New keys and values into the pages of a cache, in place, as a Pallas Mosaic GPU kernel for Hopper.

One block of threads takes the keys, or the values, of a few tokens and heads. TMA brings them to shared memory; there keys are
rotated, and for an eight-bit cache each row is quantized; then TMA puts each token where it belongs, all the block's heads in
one copy. Padding is not written at all, so no two blocks write one place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling

from pallas_kernels.quantized import LARGEST, SMALLEST, Pages, Quantized
from pallas_kernels.tuning import BLOCKS, CORES
from pallas_kernels.xla import Rotation, rotate

TOKENS = 8  # of a block: two for each of its warps
LANES = 32  # of a warp
ALIGNMENT = 128  # bytes, of what TMA copies in shared memory
BLOCK_BYTES = 1 << 15  # of keys or values that a block holds at most, unless one head's are more


def kv_write(
    k_pages: Pages,
    v_pages: Pages,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    rotation: Rotation | None = None,
    cores: int = CORES,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Pages, Pages]:
    """Write tokens' keys, rotated on their way, and values into their pages; `dispatch.why_kv_write_unsupported` says for what.

    An eight-bit cache has a scale for each token and kv head. That is the finest unit that is written at once: a page takes its
    tokens one by one, and a scale that they shared would have to change under those that are stored already. It costs 4 bytes
    beside head_dim, and multiplies whole scores and weights, not single channels.

    The cache is updated in place where the caller donates it, and what is not written keeps its value. Under `shard_map` this
    needs check_vma=False.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], in k's dtype, or Quantized to int8 or to the bits of
            float8_e4m3fn; both of one dtype.
        k, v: bfloat16 or float16 [tokens, kv_heads, head_dim].
        page_ids, offsets: as in `xla.kv_write`; tokens of the null page are not written.
        rotation: as in `xla.kv_write`; unless there are a multiple of 32 pairs, XLA rotates, before the kernel.
        cores: multiprocessors of the device, for which there should be blocks of threads.
        interpret: as in `plgpu.kernel`.
    """
    if rotation is not None and rotation[0].shape[1] % LANES:
        k, rotation = rotate(k, rotation), None
    tokens, kv_heads, head_dim = k.shape
    if tokens < TOKENS:
        k, v, page_ids, offsets, rotation = jax.tree.map(_padded, (k, v, page_ids, offsets, rotation))
    tiles = pl.cdiv(k.shape[0], TOKENS)
    heads = heads_per_block(tiles, kv_heads, TOKENS * head_dim * k.dtype.itemsize, cores)
    scratch: dict[str, Any] = {"x_smem": plgpu.SMEM((TOKENS, heads, head_dim), k.dtype), "x_full": plgpu.Barrier()}
    if isinstance(k_pages, Quantized):
        aligned = pl.cdiv(heads * head_dim, ALIGNMENT) * ALIGNMENT // head_dim  # heads: where a token begins, TMA can read
        scratch["stored_smem"] = plgpu.SMEM((TOKENS, aligned, head_dim), k_pages.values.dtype)
        scratch["scale_smem"] = plgpu.SMEM((heads, TOKENS), jnp.float32)
    cache: tuple[Pages, Pages] = jax.tree.map(jax.new_ref, (k_pages, v_pages))
    plgpu.kernel(
        _kernel,
        scratch_types=scratch,
        grid=(2, kv_heads // heads, tiles),
        grid_names=("which", "part", "tile"),
        kernel_name="kv_write",
        interpret=interpret,
    )(cache, (k, v), page_ids, offsets, rotation)
    written: tuple[Pages, Pages] = jax.tree.map(jax.freeze, cache)
    return written


def heads_per_block(tiles: int, kv_heads: int, head_bytes: int, cores: int) -> int:
    """As many as make large copies, while there are blocks for every multiprocessor and shared memory for several blocks."""
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n * head_bytes <= BLOCK_BYTES]
    return max((n for n in fitting if 2 * tiles * (kv_heads // n) >= BLOCKS * cores), default=1)


def _padded(x: jax.Array) -> jax.Array:
    """To TOKENS rows, of zeros: the null page."""
    return jnp.pad(x, ((0, TOKENS - x.shape[0]), *((0, 0),) * (x.ndim - 1)))


def _kernel(
    cache: Any, new: Any, page_ids: Any, offsets: Any, rotation: Any, *,
    x_smem: Any, x_full: Any, stored_smem: Any = None, scale_smem: Any = None,
) -> None:  # fmt: skip
    tokens, heads = new[0].shape[0], x_smem.shape[1]
    which, part, tile = (lax.axis_index(name) for name in ("which", "part", "tile"))
    start = jnp.minimum(tile * TOKENS, tokens - TOKENS)
    these, some = pl.ds(start, TOKENS), pl.ds(part * heads, heads)

    def place(token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Page and offset; the null page for what the block before the last writes already."""
        return jnp.where(token >= tile * TOKENS, page_ids[token], 0), offsets[token]

    def write(x: Any, pages: Any, rotation: Any) -> None:
        plgpu.copy_gmem_to_smem(x.at[these, some], x_smem, x_full)
        places = [place(start + i) for i in range(TOKENS)]
        turn = [_rows(side.at[these], optimized=False) for side in rotation or ()]  # JAX before 0.12 optimizes shared memory's only
        plgpu.barrier_wait(x_full)

        @pl.loop(0, heads)
        def _(head: jax.Array) -> None:
            if turn:
                _rotate(x_smem.at[:, head], *turn)
            if scale_smem is not None:
                stored_smem[:, head], scale_smem[head] = _quantized(x_smem.at[:, head], pages.kind)

        plgpu.commit_smem()
        for i, (page, offset) in enumerate(places):
            pl.when(page > 0)(partial(put, i, pages, page, offset))
        plgpu.wait_smem_to_gmem(0)

    def put(i: int, pages: Any, page: jax.Array, offset: jax.Array) -> None:
        if scale_smem is None:
            plgpu.copy_smem_to_gmem(x_smem.at[i], pages.at[page, some, offset])
            return
        plgpu.copy_smem_to_gmem(stored_smem.at[i, pl.ds(0, heads)], pages.values.at[page, some, offset])
        for head in range(heads):
            pages.scale[page, part * heads + head, offset] = scale_smem[head, i]

    pl.when(which == 0)(partial(write, new[0], cache[0], rotation))
    pl.when(which == 1)(partial(write, new[1], cache[1], None))


def _rotate(x: Any, cos: jax.Array, sin: jax.Array) -> None:
    """Turns the keys [TOKENS, head_dim] of a head where they lie, as `xla.rotate` does."""
    pairs = cos.shape[-1]
    first, second = (x.at[:, pl.ds(at, pairs)] for at in (0, pairs))
    a, b = (_rows(half).astype(jnp.float32) for half in (first, second))
    first[...] = (a * cos - b * sin).astype(x.dtype)
    second[...] = (b * cos + a * sin).astype(x.dtype)


def _quantized(x: Any, kind: str) -> tuple[jax.Array, jax.Array]:
    """The rows [TOKENS, head_dim] of a head as `quantized.quantize` has them: numbers, or the bits of fp8, and their scales."""
    wide = _rows(x).astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=1), SMALLEST) / LARGEST[jnp.dtype(kind)]
    values = wide / lax.broadcast_in_dim(scale, wide.shape, [0])
    if kind == "int8":
        return jnp.round(values).astype(jnp.int8), scale
    return lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8), scale


def _rows(x: Any, *, optimized: bool = True) -> jax.Array:
    """x [TOKENS, n * LANES], each row in one warp, whose threads read what lies side by side; optimized: as in `plgpu.load`."""
    width = 2 if x.shape[1] % (2 * LANES) == 0 else 1
    tiles = Tiling(((4, LANES * width), (width,)))
    layout = plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    loaded: jax.Array = plgpu.load(x, layout=layout, optimized=optimized)
    return loaded
