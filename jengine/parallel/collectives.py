"""Collectives between devices that share a model. On one device, or outside a sharded program, they do
nothing.

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

AXIS = "tensor"


def shards() -> int:
    """Number of devices that share the model in the function being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return int(mesh.shape[AXIS]) if AXIS in mesh.manual_axes else 1


def all_reduce(x: jax.Array) -> jax.Array:
    """The sum of x over all devices, on every device: one all-reduce.

    Where bits must not depend on a row's place, each device adds in the same order instead what an all-gather
    gives it: an all-reduce of more than two devices may begin elsewhere for each part of x.
    """
    if shards() == 1:
        return x
    if shards() == 2 or not traced_batch_invariant():
        total: jax.Array = lax.psum(x, AXIS)
        return total
    every = lax.all_gather(x, AXIS)
    total = every[0]
    for i in range(1, shards()):
        total += every[i]
    return total


def shard_index() -> jax.Array | int:
    """Index of this device among them."""
    return 0 if shards() == 1 else lax.axis_index(AXIS)


def all_to_all(x: jax.Array) -> jax.Array:
    """Exchanges this device's columns of all rows for all columns of its share of the rows: one all-to-all.

    Args:
        x: [rows, columns], where the whole is [rows, shards * columns]. Rows are padded to a multiple of the
            devices.

    Returns:
        [ceil(rows / shards), shards * columns]
    """
    return x if shards() == 1 else lax.all_to_all(_padded(x), AXIS, split_axis=0, concat_axis=1, tiled=True)


def own_rows(tree: Any) -> Any:
    """This device's share of replicated arrays [rows, ...]: the same rows as from `all_to_all`."""
    if shards() == 1:
        return tree

    def own(x: jax.Array) -> jax.Array:
        x = _padded(x)
        size = x.shape[0] // shards()
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
    every = lax.all_gather(jnp.concatenate(words, axis=1), AXIS, tiled=True)[:rows]
    out, start = [], 0
    for x in leaves:
        end = start + math.prod(x.shape[1:])
        out.append(lax.bitcast_convert_type(every[:, start:end].reshape(rows, *x.shape[1:]), x.dtype))
        start = end
    return jax.tree.unflatten(structure, out)


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % shards()), *((0, 0) for _ in x.shape[1:])))
