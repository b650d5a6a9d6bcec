"""What devices that share a model say to each other. On one device, or outside a program of many, nothing.

Programs run under `jax.shard_map`: each device computes with its own part of the weights, and every exchange is one of
these functions, so a program holds exactly the collectives that are written down (after Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "tensor"


def shards() -> int:
    """Devices that share the model in the function that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return int(mesh.shape[AXIS]) if AXIS in mesh.manual_axes else 1


def all_reduce(x: jax.Array) -> jax.Array:
    """The sum of all devices' x, on each: one all-reduce."""
    return x if shards() == 1 else lax.psum(x, AXIS)


def shard_index() -> jax.Array | int:
    """This device's place among them."""
    return 0 if shards() == 1 else lax.axis_index(AXIS)


def all_to_all(x: jax.Array) -> jax.Array:
    """All columns of this device's share of rows, for this device's columns of all rows: one all-to-all.

    Args:
        x: [rows, columns], where the whole is [rows, shards * columns]. Rows are padded to a multiple of the devices.

    Returns:
        [ceil(rows / shards), shards * columns]
    """
    return x if shards() == 1 else lax.all_to_all(_padded(x), AXIS, split_axis=0, concat_axis=1, tiled=True)


def own_rows(tree: Any) -> Any:
    """This device's share of arrays [rows, ...] that are the same on all devices; the rows that `all_to_all` gives it."""
    if shards() == 1:
        return tree

    def own(x: jax.Array) -> jax.Array:
        x = _padded(x)
        size = x.shape[0] // shards()
        return lax.dynamic_slice_in_dim(x, shard_index() * size, size)

    return jax.tree.map(own, tree)


def all_gather(tree: Any, rows: int) -> Any:
    """All devices' rows of arrays [own rows, ...] of 32-bit numbers, without the padding, on each device: one all-gather."""
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
