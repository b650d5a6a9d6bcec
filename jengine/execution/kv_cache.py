"""The paged cache: a list of layers, each a pair of page arrays, donated to every step and updated in place."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.config import ModelConfig

Cache = list[tuple[jax.Array, jax.Array]]


def page_bytes(model: ModelConfig, page_size: int, dtype: np.dtype) -> int:
    """Bytes of one page over all layers, keys and values together."""
    return 2 * model.num_layers * model.num_kv_heads * page_size * model.head_dim * dtype.itemsize


def abstract_cache(model: ModelConfig, *, num_pages: int, page_size: int, dtype: np.dtype, mesh: Mesh) -> Cache:
    """Per layer, K and V: [num_pages, kv_heads, page_size, head_dim], kv heads sharded over the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    pages = jax.ShapeDtypeStruct((num_pages, model.num_kv_heads, page_size, model.head_dim), dtype, sharding=sharding)
    return [(pages, pages) for _ in range(model.num_layers)]  # type: ignore[misc]
