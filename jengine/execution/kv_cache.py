"""The paged cache: the arrays that cache groups declare, by pool, donated to every step and updated in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.models.cache import CacheGroup, PageArray, places
from jengine.parallel.collectives import AXIS
from jengine.table.pages import SWAPS
from pallas_kernels import dispatch, xla
from pallas_kernels.quantized import LARGEST, Pages, Quantized, movable, quantize

Place = tuple[Pages, ...]  # of one layer of each group of a pool, [pages, ...]: keys and values, say
Cache = list[list[Place]]  # by pool
Page = list[Pages]  # on its way between the device and the host: for each kind of array, [arrays of that kind, ...]
COPIES = 64  # pages copied by one call
SHARED = 0  # the pool whose pages are copied, and kept on the host


def page_bytes(groups: tuple[CacheGroup, ...], pool: int, page_size: int, dtype: np.dtype, devices: int) -> int:
    """Bytes of one page of a pool on each device, over the layers of its group, scales included."""
    total = 0
    for array in (array for place in places(groups, pool) for array in place):
        leaves = jax.tree.leaves(_abstract(array, 1, page_size, dtype))
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) // (1 if array.sharded is None else devices)
    return total


def abstract_cache(groups: tuple[CacheGroup, ...], num_pages: Sequence[int], page_size: int, dtype: np.dtype, mesh: Mesh) -> Cache:
    """All pools' arrays, [num_pages of the pool, *page]: of keys and of values [num_pages, kv_heads, page_size, head_dim], kv heads sharded
    over the mesh.

    Layers of different groups that have the same place share arrays: a page is one group's at a time, see models/cache.py.

    An eight-bit dtype comes with a scale for each row of the last axis: [num_pages, kv_heads, page_size].
    """

    def placed(array: PageArray, pages: int) -> Pages:
        return _placed(_abstract(array, pages, page_size, dtype), array, mesh)

    return [[tuple(placed(array, pages) for array in place) for place in places(groups, pool)] for pool, pages in enumerate(num_pages)]


def make_copy(device: jax.Device) -> Callable[[Cache, jax.Array, jax.Array], Cache]:
    """The function to compile: (cache, sources, targets) -> cache, page ids int32 [COPIES] of the shared pool; padding copies the null
    page to itself.

    Args:
        device: that it is compiled for, or one of them.
    """

    def copied(place: Place, sources: jax.Array, targets: jax.Array) -> Place:
        if len(place) == 2:
            return dispatch.copy_pages(*place, sources, targets, device=device)
        return tuple(xla.copied(pages, sources, targets) for pages in place)

    def copy(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        return [[copied(place, sources, targets) for place in cache[SHARED]], *cache[SHARED + 1 :]]

    return copy


def abstract_page(groups: tuple[CacheGroup, ...], page_size: int, dtype: np.dtype, mesh: Mesh) -> Page:
    """A page of the shared pool: for each kind of array, those of all places, as keys and values [2 * places, kv_heads, page_size,
    head_dim], sharded as in the cache; an eight-bit dtype comes with its scales.
    """
    arrays = [array for place in places(groups, SHARED) for array in place]
    return [_placed(_abstract(kind, arrays.count(kind), page_size, dtype), kind, mesh) for kind in dict.fromkeys(arrays)]


def spill_pages(cache: Cache, pages: jax.Array) -> list[Page]:
    """Copies of pages int32 [SWAPS], each of arrays that can go their way alone; see `abstract_page`."""
    kinds = [
        jax.tree.map(lambda *arrays: jnp.stack([array[pages] for array in arrays], 1), *[array for _, _, array in kind])
        for kind in _by_kind(cache[SHARED])
    ]
    return [jax.tree.map(lambda copies, number=number: copies[number], kinds) for number in range(SWAPS)]


def fill_pages(cache: Cache, copies: list[Page], pages: jax.Array) -> Cache:
    """The cache with SWAPS copies put into pages int32 [SWAPS], in place where the caller donates it. Padding goes to the null page."""
    filled = [list(place) for place in cache[SHARED]]
    for number, kind in enumerate(_by_kind(cache[SHARED])):
        every = jax.tree.map(lambda *arrays: jnp.stack(arrays, 1), *[copy[number] for copy in copies])
        for index, (place, at, pool) in enumerate(kind):
            filled[place][at] = jax.tree.map(lambda array, new, index=index: array.at[pages].set(new[index]), pool, every)
    return [[tuple(place) for place in filled], *cache[SHARED + 1 :]]


def _by_kind(pool: list[Place]) -> list[list[tuple[int, int, Pages]]]:
    """A pool's arrays, those of one form together, as `abstract_page` has them: (place, which of its arrays, the array)."""
    kinds: dict[Any, list[tuple[int, int, Pages]]] = {}
    for place, arrays in enumerate(pool):
        for at, array in enumerate(arrays):
            form = jax.tree.structure(array), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(array))
            kinds.setdefault(form, []).append((place, at, array))
    return [*kinds.values()]


def _abstract(array: PageArray, pages: int, page_size: int, dtype: np.dtype) -> Pages:
    shape, own = (pages, *array.page(page_size)), np.dtype(array.dtype) if array.dtype else dtype
    if own not in LARGEST:
        return jax.ShapeDtypeStruct(shape, own)  # type: ignore[return-value]
    quantized: Quantized = jax.eval_shape(lambda x: movable(quantize(x, own)), jax.ShapeDtypeStruct(shape, jnp.float32))
    return quantized


def _placed(pages: Pages, array: PageArray, mesh: Mesh) -> Pages:
    axes = () if array.sharded is None else (None,) * (1 + array.sharded) + (AXIS,)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    placed: Pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pages)
    return placed
