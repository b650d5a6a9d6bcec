"""Collectives between the devices of a mesh axis: by default of `tensor`, whose devices share each matrix. On
one device, without the axis, or outside a sharded program, they do nothing.

Programs run under `jax.shard_map`: each device computes with its part of the weights, and communicates only
through these functions. So a program has exactly the collectives that are written in the source (after
Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import traced_batch_invariant

TENSOR, DATA = "tensor", "data"  # axes of a mesh, see layout.py
Axes = str | tuple[str, ...]  # one, or several as if they were one; the last one changes fastest


def shards(axes: Axes = TENSOR) -> int:
    """Number of devices along these axes in the function being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(int(mesh.shape[axis]) for axis in _present(axes))


def shard_index(axes: Axes = TENSOR) -> jax.Array | int:
    """Index of this device among them."""
    return 0 if shards(axes) == 1 else lax.axis_index(_present(axes))


def all_reduce(x: jax.Array, axes: Axes = TENSOR) -> jax.Array:
    """The sum of x over all devices of the axes, on each of them: one all-reduce.

    Where bits must not depend on a row's place, each device adds in the same order instead what an all-gather
    gives it: an all-reduce of more than two devices may begin elsewhere for each part of x.
    """
    count, names = shards(axes), _present(axes)
    if count == 1:
        return x
    if count == 2 or not traced_batch_invariant():
        total: jax.Array = lax.psum(x, names)
        return total
    every = lax.all_gather(x, names)
    total = every[0]
    for i in range(1, count):
        total += every[i]
    return total


def gather_rows(x: jax.Array, axes: Axes) -> jax.Array:
    """The rows of all devices of the axes, from [rows, ...], in their order: one all-gather."""
    if shards(axes) == 1:
        return x
    every: jax.Array = lax.all_gather(x, _present(axes), tiled=True)
    return every


def reduce_scatter(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over all devices of the axes of this device's share of the rows: one reduce-scatter.

    In a fixed order where bits must not depend on a row's place, as `all_reduce`: one all-to-all.
    """
    count, names = shards(axes), _present(axes)
    if count == 1:
        return x
    if count == 2 or not traced_batch_invariant():
        share: jax.Array = lax.psum_scatter(x, names, tiled=True)
        return share
    every = lax.all_to_all(x.reshape(count, -1, *x.shape[1:]), names, split_axis=0, concat_axis=0)
    share = every[0]
    for i in range(1, count):
        share += every[i]
    return share


def all_to_all(x: jax.Array, axes: Axes = TENSOR) -> jax.Array:
    """Exchanges this device's columns of all rows for all columns of its share of the rows: one all-to-all.

    Args:
        x: [rows, columns], where the whole is [rows, shards * columns]. Rows are padded to a multiple of the
            devices.

    Returns:
        [ceil(rows / shards), shards * columns]
    """
    count = shards(axes)
    if count == 1:
        return x
    exchanged: jax.Array = lax.all_to_all(
        _padded(x, count), _present(axes), split_axis=0, concat_axis=1, tiled=True
    )
    return exchanged


def own_rows(tree: Any) -> Any:
    """This device's share of replicated arrays [rows, ...]: the same rows as from `all_to_all`."""
    count = shards()
    if count == 1:
        return tree

    def own(x: jax.Array) -> jax.Array:
        x = _padded(x, count)
        size = x.shape[0] // count
        return lax.dynamic_slice_in_dim(x, shard_index() * size, size)

    return jax.tree.map(own, tree)


def all_gather(tree: Any, rows: int) -> Any:
    """Rows of all devices, from arrays [own rows, ...] of 32-bit numbers, without padding, on each device:
    one all-gather.
    """
    if shards() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    words = [lax.bitcast_convert_type(x, jnp.int32).reshape(x.shape[0], -1) for x in leaves]
    every = lax.all_gather(jnp.concatenate(words, axis=1), _present(TENSOR), tiled=True)[:rows]
    out, start = [], 0
    for x in leaves:
        end = start + math.prod(x.shape[1:])
        out.append(lax.bitcast_convert_type(every[:, start:end].reshape(rows, *x.shape[1:]), x.dtype))
        start = end
    return jax.tree.unflatten(structure, out)


def _present(axes: Axes) -> tuple[str, ...]:
    """The axes that the function being traced is divided over."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in ([axes] if isinstance(axes, str) else axes) if axis in manual)


def _padded(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % count), *((0, 0) for _ in x.shape[1:])))
