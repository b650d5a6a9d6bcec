"""The device mesh, and which logical axes of a parameter are spread over it."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.errors import InvalidArgument

RULES = {"kv_heads": "tensor", "heads": "tensor", "ffn": "tensor", "vocab": "tensor"}  # other axes are replicated


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of the first devices, with one axis: tensor.

    Raises:
        InvalidArgument: there are fewer devices.
    """
    devices = jax.devices()
    if not 1 <= tensor_parallel_size <= len(devices):
        raise InvalidArgument("tensor_parallel_size", tensor_parallel_size, f"must be from 1 to {len(devices)}, the devices here")
    return jax.make_mesh((tensor_parallel_size,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices[:tensor_parallel_size])


def shardings(mesh: Mesh, axes: Any) -> Any:
    """A tree of NamedSharding from a tree of tuples of logical axis names."""

    def sharding(names: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(RULES.get(name or "") for name in names)))

    return jax.tree.map(sharding, axes, is_leaf=lambda node: isinstance(node, tuple))
