"""The paged cache: the arrays that cache groups declare, by pool, donated to every step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jengine.models.cache import CacheGroup, PageArray, places
from jengine.parallel.collectives import TENSOR
from jengine.table.program_table import SWAPS
from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.cache import xla as cache_xla
from pallas_kernels.quantization.quantized import LARGEST, Pages, Quantized, movable, quantize

# arrays [pages, ...] for one layer of each group of a pool, such as keys and values
Place = tuple[Pages, ...]
Cache = list[list[Place]]  # by pool
# a page in transfer between device and host: for each kind of array, [number of such arrays, ...]
Page = list[Pages]
COPIES = 64  # pages copied by one call
SHARED = 0  # the pool whose pages can be copied, and kept on the host


def page_bytes(
    groups: tuple[CacheGroup, ...], pool: int, page_size: int, dtype: np.dtype, devices: int
) -> int:
    """Bytes of a page of this pool on each device, over the layers of its group, scales included."""
    total = 0
    for array in (array for place in places(groups, pool) for array in place):
        leaves = jax.tree.leaves(_abstract(array, 1, page_size, dtype))
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) // (
            1 if array.sharded is None else devices
        )
    return total


def abstract_cache(
    groups: tuple[CacheGroup, ...], num_pages: Sequence[int], page_size: int, dtype: np.dtype, mesh: Mesh
) -> Cache:
    """Arrays of all pools, [num_pages of the pool, *page].

    Keys and values are [num_pages, kv_heads, page_size, head_dim] each, with kv heads sharded over the mesh.

    Layers at the same place in different groups share arrays, since a page belongs to one group at a time;
    see models/cache.py.

    An eight-bit dtype has a scale for each row of the last axis: [num_pages, kv_heads, page_size].
    """

    def placed(array: PageArray, pages: int) -> Pages:
        return _placed(_abstract(array, pages, page_size, dtype), array, mesh)

    return [
        [tuple(placed(array, pages) for array in place) for place in places(groups, pool)]
        for pool, pages in enumerate(num_pages)
    ]


def views(place: Place, group: CacheGroup, page_size: int) -> Place:
    """The arrays of a place as those of one layer, [parts * pages, ...]: page p of the layer's part i is
    parts * p + i. The same memory.

    Scales may have more rows than values have heads. Those of the heads come first; the others are unused.
    """

    def view(pages: Any, array: PageArray) -> Any:
        _, *rest = array.page(page_size)
        if group.parts == 1 and tuple(pages.shape[2:]) == tuple(rest):
            return pages
        if isinstance(pages, Quantized):
            return dataclasses.replace(
                pages, values=divided(pages.values, *rest), scale=divided(pages.scale, *rest[:-1])
            )
        return divided(pages, *rest)

    def divided(pages: Any, *rest: int) -> Any:
        rows = math.prod(pages.shape[1:]) // (group.parts * math.prod(rest))
        return pages.reshape(group.parts * pages.shape[0], rows, *rest)

    return tuple(view(pages, array) for pages, array in zip(place, group.arrays, strict=True))


def make_copy(device: jax.Device) -> Callable[[Cache, jax.Array, jax.Array], Cache]:
    """The function to compile: (cache, sources, targets) -> cache. Copies pages of the shared pool, ids int32
    [COPIES].

    Padding copies the null page to itself.

    Args:
        device: a device that it is compiled for.
    """

    def copied(place: Place, sources: jax.Array, targets: jax.Array) -> Place:
        if len(place) == 2:
            return cache_dispatch.copy_pages(*place, sources, targets, device=device)
        return tuple(cache_xla.copied(pages, sources, targets) for pages in place)

    def copy(cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
        return [[copied(place, sources, targets) for place in cache[SHARED]], *cache[SHARED + 1 :]]

    return copy


def abstract_page(groups: tuple[CacheGroup, ...], page_size: int, dtype: np.dtype, mesh: Mesh) -> Page:
    """A page of the shared pool: for each kind of array, those of all places together, sharded as in the
    cache.

    Keys and values are [2 * places, kv_heads, page_size, head_dim]. An eight-bit dtype also has scales.
    """
    arrays = [array for place in places(groups, SHARED) for array in place]
    return [
        _placed(_abstract(kind, arrays.count(kind), page_size, dtype), kind, mesh)
        for kind in dict.fromkeys(arrays)
    ]


def spill_pages(cache: Cache, pages: jax.Array) -> list[Page]:
    """Copies of pages int32 [SWAPS], in separate arrays that can be transferred; see `abstract_page`."""
    kinds = [
        jax.tree.map(
            lambda *arrays: jnp.stack([array[pages] for array in arrays], 1), *[array for _, _, array in kind]
        )
        for kind in _by_kind(cache[SHARED])
    ]
    return [jax.tree.map(lambda copies, number=number: copies[number], kinds) for number in range(SWAPS)]


def fill_pages(cache: Cache, copies: list[Page], pages: jax.Array) -> Cache:
    """Writes SWAPS copies to pages int32 [SWAPS], in a donated cache. Padding goes to the null page."""
    filled = [list(place) for place in cache[SHARED]]
    for number, kind in enumerate(_by_kind(cache[SHARED])):
        every = jax.tree.map(lambda *arrays: jnp.stack(arrays, 1), *[copy[number] for copy in copies])
        for index, (place, at, pool) in enumerate(kind):
            filled[place][at] = jax.tree.map(
                lambda array, new, index=index: array.at[pages].set(new[index]), pool, every
            )
    return [[tuple(place) for place in filled], *cache[SHARED + 1 :]]


def _by_kind(pool: list[Place]) -> list[list[tuple[int, int, Pages]]]:
    """A pool's arrays grouped by kind, as in `abstract_page`: (place, index within the place, array)."""
    kinds: dict[Any, list[tuple[int, int, Pages]]] = {}
    for place, arrays in enumerate(pool):
        for at, array in enumerate(arrays):
            form = (
                jax.tree.structure(array),
                tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(array)),
            )
            kinds.setdefault(form, []).append((place, at, array))
    return [*kinds.values()]


@functools.lru_cache(maxsize=256)  # layers are alike, and tracing takes milliseconds
def _abstract(array: PageArray, pages: int, page_size: int, dtype: np.dtype) -> Pages:
    shape, stored_dtype = (pages, *array.page(page_size)), np.dtype(array.dtype) if array.dtype else dtype
    if stored_dtype not in LARGEST:
        return jax.ShapeDtypeStruct(shape, stored_dtype)  # type: ignore[return-value]
    quantized: Quantized = jax.eval_shape(
        lambda x: movable(quantize(x, stored_dtype)), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    return quantized


def _placed(pages: Pages, array: PageArray, mesh: Mesh) -> Pages:
    axes = () if array.sharded is None else (None,) * (1 + array.sharded) + (TENSOR,)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    placed: Pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pages)
    return placed


def parts_of(page: Page) -> list[memoryview]:
    """The bytes of a page's arrays. Waits until they are there."""
    leaves = [np.ascontiguousarray(np.asarray(leaf)) for leaf in jax.tree.leaves(page)]
    return [memoryview(leaf.reshape(-1).view(np.uint8)) for leaf in leaves]


def leaves_of(data: bytes, like: Page) -> Sequence[np.ndarray] | None:
    """The arrays of a page with the shapes and dtypes of `like`; None: the number of bytes is wrong."""
    leaves, at = list[np.ndarray](), 0
    abstract = jax.tree.leaves(like)
    if len(data) != sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in abstract):
        return None
    for leaf in abstract:
        count = math.prod(leaf.shape)
        leaves.append(np.frombuffer(data, leaf.dtype, count, at).reshape(leaf.shape))
        at += count * leaf.dtype.itemsize
    return leaves
