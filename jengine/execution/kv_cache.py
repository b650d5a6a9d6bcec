"""The paged cache: a list of layers, each a pair of page arrays, donated to every step and updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.config import ModelConfig
from jengine.parallel.collectives import AXIS
from pallas_kernels.quantized import LARGEST, Pages, Quantized, movable, quantize

Cache = list[tuple[Pages, Pages]]


def page_bytes(model: ModelConfig, page_size: int, dtype: np.dtype) -> int:
    """Bytes of one page on each device over all layers, keys and values together, scales included."""
    arrays = jax.tree.leaves(_pages(model, 1, page_size, dtype))
    total: int = 2 * model.num_layers * sum(int(x.size) * x.dtype.itemsize for x in arrays) // model.shards
    return total


def abstract_cache(model: ModelConfig, *, num_pages: int, page_size: int, dtype: np.dtype, mesh: Mesh) -> Cache:
    """Per layer, K and V: [num_pages, kv_heads, page_size, head_dim], kv heads sharded over the mesh.

    An eight-bit dtype comes with a scale for each token and kv head: [num_pages, kv_heads, page_size].
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))
    pages = _pages(model, num_pages, page_size, dtype)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pages)
    return [(placed, placed) for _ in range(model.num_layers)]


def _pages(model: ModelConfig, num_pages: int, page_size: int, dtype: np.dtype) -> Pages:
    shape = (num_pages, model.num_kv_heads_padded, page_size, model.head_dim)
    if dtype not in LARGEST:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[return-value]
    quantized: Quantized = jax.eval_shape(lambda x: movable(quantize(x, dtype)), jax.ShapeDtypeStruct(shape, jnp.float32))
    return quantized
