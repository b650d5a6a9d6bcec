"""Multi-head latent attention (DeepSeek-V2, 2024): all heads' keys and values are computed from one short,
cached vector per token.

The matrices that expand the vector to keys and values are applied to queries and results instead
("absorbed"). So heads attend to the cached vectors directly: there are as many query heads, and one kv head,
whose value is the first channels of its key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jengine.models.cache import TOKENS, CacheEntry, PageArray, Queries
from jengine.models.config import ModelConfig
from jengine.models.layers import Attend, Matrix, RMSNorm, dense, matrix, param, row_parallel_dense
from jengine.models.pieces import EVERY, Piece
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv
from pallas_kernels.devices import traced_batch_invariant, traced_for_cpu
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from pallas_kernels.products.weights import product

NORM_EPS = 1e-6  # for compressed queries and cached vectors, independent of the model's eps


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: caches one vector per token, from which the keys and values of all heads
    are computed.

    Attributes:
        rank: channels of that vector, without the rotating ones.
        query_rank: channels of the corresponding vector for queries, which is not cached; None: queries are
            computed from hidden states.
        key_dim: non-rotating channels of a head's query and key.
        rotary_dim: rotating channels. All heads share the key's, which are cached too.
        value_dim: channels of a head's value.
        interleaved: whether channels rotate with their neighbours in the checkpoint.
    """

    rank: int
    query_rank: int | None
    key_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.key_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Channels cached for a token."""
        return self.rank + self.rotary_dim


class MultiHeadLatentAttention(nnx.Module):
    q_down: Matrix | None = None  # for compressed queries
    q_norm: RMSNorm | None = None

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        self.config, self.latent = config, config.part(LatentAttention)
        latent, heads, hidden, laid = (
            self.latent,
            config.num_heads,
            config.hidden_size,
            config.padded(config.num_heads),
        )
        eps = dataclasses.replace(config, norm_eps=NORM_EPS)
        inputs, up = hidden, "q_proj"
        if latent.query_rank is not None:
            inputs, up = latent.query_rank, "q_b_proj"
            down = Piece(f"{name}.q_a_proj.weight", (inputs, hidden))
            self.q_down = matrix((inputs, hidden), dtype, (None, None), down)
            self.q_norm = RMSNorm(inputs, eps, dtype, f"{name}.q_a_layernorm")
        queries = _queries(latent, Piece(f"{name}.{up}.weight", (heads * latent.query_dim, inputs)), heads)
        self.q = matrix((laid, latent.query_dim, inputs), dtype, ("heads", None, None), *queries)
        cached = Piece(f"{name}.kv_a_proj_with_mqa.weight", (latent.cached_dim, hidden))
        self.kv_down = matrix(
            (latent.cached_dim, hidden), dtype, (None, None), *_rotated_last(latent, cached, latent.rank)
        )
        self.kv_norm = RMSNorm(latent.rank, eps, dtype, f"{name}.kv_a_layernorm")
        expanded = latent.key_dim + latent.value_dim
        source = Piece(f"{name}.kv_b_proj.weight", (heads * expanded, latent.rank), (slice(0, heads),))
        self.kv_up = param(
            (laid, expanded, latent.rank), dtype, ("heads", None, None), source, multiplies=True
        )
        out = Piece(
            f"{name}.o_proj.weight",
            (hidden, heads * latent.value_dim),
            (EVERY, slice(0, heads * latent.value_dim)),
        )
        self.o = matrix((hidden, laid * latent.value_dim), dtype, (None, "heads"), out)

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        """x [N, hidden] -> [N, hidden]."""
        assert rotation is not None and self.config.attention_scale is not None
        latent = self.latent
        inputs = x if self.q_down is None or self.q_norm is None else self.q_norm(dense(x, self.q_down[...]))
        q = dense(inputs, self.q[...])  # [N, heads, key_dim + rotary_dim]
        cached = dense(x, self.kv_down[...])
        keys, values = jnp.split(self.kv_up[...], [latent.key_dim], axis=1)
        q_latent = _by_head(q[..., : latent.key_dim], jnp.swapaxes(keys, 1, 2))
        q = jnp.concatenate([q_latent, rotate_by_xla(q[..., latent.key_dim :], rotation)], axis=-1)
        k_rotated = rotate_by_xla(cached[:, None, latent.rank :], rotation)
        k = jnp.concatenate([self.kv_norm(cached[:, : latent.rank])[:, None], k_rotated], axis=-1)
        options = AttentionOptions(self.config.attention_scale)
        y = attend(layer, Qkv(q, k, k[..., : latent.rank]), None, options)
        return row_parallel_dense(_by_head(y, values).reshape(x.shape[0], -1), self.o[...])

    def cache(self, layer: int) -> CacheEntry:
        """One vector of each token, on each device."""
        latent, config = self.latent, self.config
        heads = config.padded(config.num_heads) // config.shards
        return CacheEntry(
            kind="latent",
            arrays=(PageArray((1, TOKENS, latent.cached_dim), sharded=None),),
            operations=2 * config.num_heads * (latent.cached_dim + latent.rank),
            channels=6 * 3 * heads * latent.query_dim,
            queries=Queries(heads=heads, dim=latent.cached_dim, rank=latent.rank),
        )


def _by_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product for each head, summed in float32: x [N, heads, in], weight [heads, out, in] -> [N, heads,
    out].
    """
    if traced_for_cpu() and traced_batch_invariant():  # XLA's own product may sum a row by its place
        y: jax.Array = lax.map(lambda pair: product(*pair), (jnp.moveaxis(x, 1, 0), weight))
        return jnp.moveaxis(y, 0, 1)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("nhi,hoi->nho", x, weight, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _queries(latent: LatentAttention, piece: Piece, heads: int) -> Iterator[Piece]:
    """The pieces of the checkpoint's rows of queries, for a parameter [heads, query_dim, in]."""
    if not latent.interleaved:
        yield piece._replace(part=(slice(0, heads),))
        return
    for head in range(heads):
        start, single = head * latent.query_dim, slice(head, head + 1)
        for part in _rotated_last(latent, piece, latent.key_dim, start):
            yield part._replace(part=(single, *part.part))


def _rotated_last(latent: LatentAttention, piece: Piece, plain: int, start: int = 0) -> Iterator[Piece]:
    """The pieces of rows from `start` on; rows after the first `plain` rotate.

    In the checkpoint adjacent rows rotate together, here rows that are half of rotary_dim apart.
    """
    half, end = latent.rotary_dim // 2, start + plain + latent.rotary_dim
    if not latent.interleaved:
        yield piece._replace(part=(slice(0, plain + 2 * half),), rows=slice(start, end))
        return
    yield piece._replace(part=(slice(0, plain),), rows=slice(start, start + plain))
    for odd in range(2):
        to = plain + odd * half
        yield piece._replace(part=(slice(to, to + half),), rows=slice(start + plain + odd, end, 2))
