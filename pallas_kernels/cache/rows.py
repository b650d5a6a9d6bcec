"""What the GPU kernels that write tokens to a paged cache share: how their arguments and results are
arranged, and rows of queries, keys and values in a warpgroup's registers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling

from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from pallas_kernels.quantization.quantized import LARGEST, SMALLEST

TOKENS = 8  # per thread block: two per warp
LANES = 32  # per warp


def joined(qkv: Qkv | QkvProduct, rotation: Rotation | None) -> tuple[QkvProduct, Rotation | None]:
    """The rows of all heads as one array, and the rotation that is left. If the number of pairs is not a
    multiple of LANES, XLA normalizes, rotates and concatenates, in the same fusion.
    """
    if rotation is not None and rotation[0].shape[1] % LANES:
        q, k, v = jax.tree.map(lambda x: x.astype(jnp.float32), qkv).split()
        turned = Qkv(rotate_by_xla(q, rotation), rotate_by_xla(k, rotation), v)
        qkv, rotation = jax.tree.map(lambda x: x.astype(qkv.dtype), turned), None
    return qkv.joined(), rotation


def query_types(product: QkvProduct, rows: int) -> list[jax.ShapeDtypeStruct]:
    """A kernel's results: queries of the first rows and of the others, without those that are empty."""
    tokens, kv_heads, _, head_dim = product.rows.shape
    shape = kv_heads, product.group, head_dim
    return [jax.ShapeDtypeStruct((n, *shape), product.dtype) for n in (rows, tokens - rows) if n]


def queries_of(results: Sequence[jax.Array], rows: int) -> Queries:
    """Results of `query_types` as queries of decoding rows and of prompts."""
    apart = [x.reshape(len(x), -1, x.shape[-1]) for x in results]
    none = apart[0][:0]
    return apart[0] if rows else none, apart[-1] if len(apart) == 2 or not rows else none


def parts_of(pairs: int, head_dim: int) -> list[Any]:
    """Slices of a row: first and second numbers of the pairs that are rotated, and the others."""
    return [pl.ds(at, end - at) for at, end in itertools.pairwise(sorted({0, pairs, 2 * pairs, head_dim}))]


def layout_of(pairs: int, head_dim: int) -> Any:
    """Layout of [TOKENS, n], of parts and whole rows: each row in one warp, with adjacent columns in each
    thread.
    """
    width = 2 if math.gcd(pairs, head_dim) % (2 * LANES) == 0 else 1
    tiles = Tiling(((4, LANES * width), (width,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def spread(x: jax.Array, size: int, layout: Any, axis: int = 0) -> jax.Array:
    """A number for each token, or for each column (axis 1), as [TOKENS, size]."""
    wide: jax.Array = plgpu.layout_cast(lax.broadcast_in_dim(x, (TOKENS, size), [axis]), layout)
    return wide


def normalized(
    parts: Sequence[jax.Array], factors: Sequence[jax.Array], eps: float, layout: Any
) -> list[jax.Array]:
    """Applies the root mean square norm to rows that are split into parts [TOKENS, n], with factors [n]."""
    squares, sizes = [(part * part).sum(axis=1) for part in parts], [part.shape[1] for part in parts]
    scale = lax.rsqrt(sum(squares[1:], squares[0]) / sum(sizes) + eps)
    return [
        part * spread(scale, size, layout) * spread(factor, size, layout, 1)
        for part, factor, size in zip(parts, factors, sizes, strict=True)
    ]


def rotated(parts: Sequence[jax.Array], angles: Sequence[jax.Array]) -> list[jax.Array]:
    """Rotates the pairs of rows that are split into parts, by cosines and sines [TOKENS, pairs]."""
    (cos, sin), (first, second, *rest) = angles, parts
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def scaled(parts: Sequence[jax.Array], kind: str, layout: Any) -> tuple[list[jax.Array], jax.Array]:
    """Float32 rows that are split into parts, divided by the scales [TOKENS] of `quantized.quantize`, and
    these.
    """
    largest = [jnp.abs(part).max(axis=1) for part in parts]
    for other in largest[1:]:
        largest[0] = jnp.maximum(largest[0], other)
    scale = jnp.maximum(largest[0], SMALLEST) / LARGEST[jnp.dtype(kind)]
    return [part / spread(scale, part.shape[1], layout) for part in parts], scale
