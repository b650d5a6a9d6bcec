"""The paged cache: pairs of page arrays, as many as the largest cache group has layers, donated to every step and updated in place."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.config import ModelConfig
from jengine.models.cache import cache_groups
from jengine.pages import SWAPS
from jengine.parallel.collectives import AXIS
from pallas_kernels import dispatch
from pallas_kernels.quantized import LARGEST, Pages, Quantized, movable, quantize

Cache = list[tuple[Pages, Pages]]
COPIES = 64  # pages copied by one call


def page_bytes(model: ModelConfig, page_size: int, dtype: np.dtype) -> int:
    """Bytes of one page on each device over the layers of its group, keys and values together, scales included."""
    arrays = jax.tree.leaves(_pages(model, 1, page_size, dtype))
    total: int = 2 * _places(model) * sum(int(x.size) * x.dtype.itemsize for x in arrays) // model.shards
    return total


def abstract_cache(model: ModelConfig, *, num_pages: int, page_size: int, dtype: np.dtype, mesh: Mesh) -> Cache:
    """K and V for each place in a group: [num_pages, kv_heads, page_size, head_dim], kv heads sharded over the mesh.

    Layers of different groups that have the same place share arrays: a page is one group's at a time, see models/cache.py.

    An eight-bit dtype comes with a scale for each token and kv head: [num_pages, kv_heads, page_size].
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))
    pages = _pages(model, num_pages, page_size, dtype)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pages)
    return [(placed, placed) for _ in range(_places(model))]


def make_copy(device: jax.Device) -> Callable[[Cache, jax.Array, jax.Array], Cache]:
    """The function to compile: (cache, sources, targets) -> cache, page ids int32 [COPIES]; padding copies the null page to itself.

    Args:
        device: that it is compiled for, or one of them.
    """

    def copy(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        return [dispatch.copy_pages(k, v, sources, targets, device=device) for k, v in cache]

    return copy


def abstract_page(model: ModelConfig, *, page_size: int, dtype: np.dtype, mesh: Mesh) -> Pages:
    """A page on its way between the device and the host, keys and values of all places in a group: [2 * places, kv_heads, page_size,
    head_dim], kv heads sharded over the mesh; an eight-bit dtype comes with its scales.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))
    page = _pages(model, 2 * _places(model), page_size, dtype)
    placed: Pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), page)
    return placed


def spill_pages(cache: Cache, pages: jax.Array) -> list[Pages]:
    """Copies of pages int32 [SWAPS], each an array that can go its way alone; see `abstract_page`."""
    halves = [half for pair in cache for half in pair]
    copies = jax.tree.map(lambda *arrays: jnp.stack([array[pages] for array in arrays], 1), *halves)
    return [jax.tree.map(itemgetter(number), copies) for number in range(SWAPS)]


def fill_pages(cache: Cache, copies: list[Pages], pages: jax.Array) -> Cache:
    """The cache with SWAPS copies put into pages int32 [SWAPS], in place where the caller donates it. Padding goes to the null page."""
    every = jax.tree.map(lambda *arrays: jnp.stack(arrays, 1), *copies)

    def put(half: Pages, place: int) -> Pages:
        filled: Pages = jax.tree.map(lambda array, new: array.at[pages].set(new[place]), half, every)
        return filled

    return [(put(k, 2 * place), put(v, 2 * place + 1)) for place, (k, v) in enumerate(cache)]


def _places(model: ModelConfig) -> int:
    return max(len(group.layers) for group in cache_groups(model))


def _pages(model: ModelConfig, num_pages: int, page_size: int, dtype: np.dtype) -> Pages:
    shape = (num_pages, model.num_kv_heads_padded, page_size, model.head_dim)
    if dtype not in LARGEST:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[return-value]
    quantized: Quantized = jax.eval_shape(lambda x: movable(quantize(x, dtype)), jax.ShapeDtypeStruct(shape, jnp.float32))
    return quantized
