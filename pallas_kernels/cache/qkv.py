"""Queries, keys and values of tokens, as models pass them to attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise.norm import rms_norm


class Qkv(NamedTuple):
    """Queries, keys and values as separate arrays.

    Attributes:
        q: [tokens, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        k, v: [tokens, kv_heads, head_dim]. In latent attention, values are the first channels of their keys.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        return self.q.dtype

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[1]

    def split(self) -> Qkv:
        return self

    def joined(self) -> QkvProduct:
        """Queries, keys and values concatenated to one array."""
        tokens, kv_heads, head_dim = self.k.shape
        q = self.q.reshape(tokens, kv_heads, -1, head_dim)
        return QkvProduct(jnp.concatenate([q, self.k[:, :, None], self.v[:, :, None]], axis=2), q.shape[2])


class QueriesOnly(NamedTuple):
    """Queries [tokens, heads, head_dim] of a layer that reads another layer's keys and values, which are
    already in the cache.
    """

    q: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        return self.q.dtype

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[1]


@partial(jax.tree_util.register_dataclass, data_fields=("q", "k"), meta_fields=("eps", "offset"))
@dataclass(frozen=True)
class HeadNorm:
    """A root mean square norm of each query and key.

    Attributes:
        q, k: weights [head_dim].
        eps: added to the mean of squares.
        offset: added to the weights.
    """

    q: jax.Array
    k: jax.Array
    eps: float
    offset: float = 0.0


@partial(jax.tree_util.register_dataclass, data_fields=("rows", "norm"), meta_fields=("group",))
@dataclass(frozen=True)
class QkvProduct:
    """Queries, keys and values as the result of one matrix product.

    Attributes:
        rows: [tokens, kv_heads, group + 2 + others, head_dim]: for each kv head its queries, its key, its
            value, and rows that attention ignores.
        group: number of queries per kv head.
        norm: applied to queries and keys, before they are rotated.
    """

    rows: jax.Array
    group: int
    norm: HeadNorm | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return self.rows.dtype

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.rows.shape[1] * self.group

    def split(self) -> Qkv:
        """Separate arrays, with queries and keys normalized."""
        rows, group, norm = self.rows, self.group, self.norm
        q, k = rows[:, :, :group].reshape(rows.shape[0], -1, rows.shape[-1]), rows[:, :, group]
        if norm is not None:
            q, k = (rms_norm(x, weight, norm.eps, norm.offset) for x, weight in ((q, norm.q), (k, norm.k)))
        return Qkv(q, k, rows[:, :, group + 1])

    def joined(self) -> QkvProduct:
        return self
