"""The device mesh, and which logical axes of a parameter are sharded over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.base.errors import InvalidArgument
from jengine.parallel.collectives import AXIS
from pallas_kernels.devices import visible_devices
from pallas_kernels.weights import is_weight, stored

RULES = {"kv_heads": AXIS, "heads": AXIS, "ffn": AXIS, "vocab": AXIS}  # other axes are replicated


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first of these devices, or of all existing devices, with one axis: tensor.

    Raises:
        InvalidArgument: there are too few devices.
    """
    devices = visible_devices() if devices is None else devices
    if not 1 <= tensor_parallel_size <= len(devices):
        limit = f"must be from 1 to {len(devices)}, the number of devices"
        if devices and devices[0].platform == "cpu" and tensor_parallel_size > 1:
            limit += (
                f"; with the environment variable JAX_NUM_CPU_DEVICES={tensor_parallel_size}, the CPU counts"
                " as so many"
            )
        raise InvalidArgument("tensor_parallel_size", tensor_parallel_size, limit)
    return jax.make_mesh(
        (tensor_parallel_size,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:tensor_parallel_size]
    )


def one_axis(mesh: Mesh) -> Mesh:
    """The devices of a caller's mesh, as a mesh with one axis: tensor.

    Raises:
        InvalidArgument: an engine cannot use such a mesh.
    """
    if not isinstance(mesh, Mesh) or not mesh.size:
        raise InvalidArgument("mesh", mesh, "must be a jax.sharding.Mesh with at least one device")
    devices = mesh.devices.flatten()
    shape = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    if max(mesh.shape.values()) < mesh.size:
        raise InvalidArgument(
            "mesh", shape, "must have at most one axis with more than one device: all of them share the model"
        )
    if len({*devices}) < mesh.size:
        raise InvalidArgument("mesh", shape, "must not have a device twice")
    if len({device.device_kind for device in devices}) > 1:
        raise InvalidArgument("mesh", shape, "must have devices of one kind")
    if any(device.process_index != jax.process_index() for device in devices):
        raise InvalidArgument("mesh", shape, "must have only devices of this process")
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def with_mesh_size(options: dict[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    """Options whose tensor_parallel_size is the number of the mesh's devices, unless it is given."""
    return options if mesh is None else {"tensor_parallel_size": one_axis(mesh).size, **options}


def shard_mapped(
    mesh: Mesh, function: Callable[..., Any], args: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Runs `function` on each device with its shards of the arguments.

    Args:
        args: trees of jax.ShapeDtypeStruct, whose shardings determine each device's part.
        out_specs: a PartitionSpec for each result, or for each tree of results.
    """
    in_specs = tuple(jax.tree.map(lambda x: x.sharding.spec, arg) for arg in args)
    mapped: Callable[..., Any] = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return mapped


def with_shardings(mesh: Mesh, params: Any, axes: Any) -> Any:
    """Adds shardings to abstract parameters, given a tree of tuples of logical axis names."""

    def place(array: Any, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*(RULES.get(name or "") for name in names)))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def placed(parameter: Any, names: tuple[str | None, ...]) -> Any:
        return jax.tree.map(place, parameter, stored(parameter).axes(names))

    return jax.tree.map(placed, params, axes, is_leaf=is_weight)
