"""The device mesh, and which logical axes of a parameter are sharded over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.base.errors import InvalidArgument
from jengine.parallel.collectives import DATA, TENSOR, Axes
from jengine.parallel.layout import Layout
from pallas_kernels.devices import visible_devices
from pallas_kernels.products.weights import is_weight, stored

Rules = dict[str, Axes]  # the mesh axes that a logical axis lies over; other axes are whole on each device
RULES: Rules = {"kv_heads": TENSOR, "heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR}
# of weights with an axis of experts, under expert parallelism
EXPERT_RULES: Rules = {"experts": (DATA, TENSOR)}


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first of these devices, or of all existing devices, with one axis: tensor.

    Raises:
        InvalidArgument: there are too few devices.
    """
    devices = visible_devices() if devices is None else devices
    if not 1 <= tensor_parallel_size <= len(devices):
        limit = f"must be from 1 to {len(devices)}, the number of devices"
        raise InvalidArgument(
            "tensor_parallel_size", tensor_parallel_size, limit + _hint(devices, tensor_parallel_size)
        )
    return stage_meshes(Layout(tensor=tensor_parallel_size), devices)[0]


def stage_meshes(layout: Layout, devices: Sequence[jax.Device] | None = None) -> list[Mesh]:
    """A mesh for each stage, of the first of these devices, or of all existing devices. Axes: data, if the
    layout has it, and tensor, whose devices are neighbours.

    Raises:
        InvalidArgument: there are too few devices.
    """
    devices = visible_devices() if devices is None else devices
    if layout.devices > len(devices):
        limit = f"needs {layout.devices} devices, of {len(devices)}"
        raise InvalidArgument("devices", str(layout), limit + _hint(devices, layout.devices))
    shape = {DATA: layout.data, TENSOR: layout.tensor} if layout.data > 1 else {TENSOR: layout.tensor}
    each = layout.stage_devices
    return [
        jax.make_mesh(
            tuple(shape.values()),
            tuple(shape),
            axis_types=(AxisType.Auto,) * len(shape),
            devices=devices[stage * each : (stage + 1) * each],
        )
        for stage in range(layout.stages)
    ]


def _hint(devices: Sequence[jax.Device], count: int) -> str:
    if not devices or devices[0].platform != "cpu" or count < 2:
        return ""
    return f"; with the environment variable JAX_NUM_CPU_DEVICES={count}, the CPU counts as so many"


def rank_mesh(mesh: Mesh, rank: int) -> Mesh:
    """The mesh of one of a mesh's ranks, which are the places along the axis data."""
    return Mesh(mesh.devices[rank], (TENSOR,), axis_types=(AxisType.Auto,))


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
    return Mesh(devices, (TENSOR,), axis_types=(AxisType.Auto,))


def with_mesh_size(options: dict[str, Any], mesh: Mesh | None) -> dict[str, Any]:
    """Options whose tensor_parallel_size is the number of the mesh's devices, unless it is given."""
    return options if mesh is None else {"tensor_parallel_size": one_axis(mesh).size, **options}


def local(tree: Any) -> Any:
    """Abstract arrays of one device's part of these, which have shardings."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype), tree
    )


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


def rules_of(names: Sequence[str | None], *, expert_parallel: bool = False) -> Rules:
    """The rules for a weight with these logical axes."""
    return EXPERT_RULES if expert_parallel and "experts" in names else RULES


def partition(names: Sequence[str | None], mesh: Mesh, *, expert_parallel: bool = False) -> PartitionSpec:
    """The mesh axes that a weight with these logical axes lies over."""
    rules = rules_of(names, expert_parallel=expert_parallel)

    def over(name: str | None) -> Axes | None:
        axes = rules.get(name or "")
        if axes is None or isinstance(axes, str):
            return axes
        present = tuple(axis for axis in axes if axis in mesh.axis_names)
        return present[0] if len(present) == 1 else present

    return PartitionSpec(*map(over, names))


def with_shardings(mesh: Mesh, params: Any, axes: Any, *, expert_shards: int = 1) -> Any:
    """Adds shardings to abstract parameters, given a tree of tuples of logical axis names.

    Args:
        expert_shards: see ModelConfig. If the mesh has fewer devices, these are one rank's, and so are the
            experts.
    """

    def place(array: Any, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        spec, shape = partition(names, mesh, expert_parallel=expert_shards > 1), array.shape
        if expert_shards > 1 and names[:1] == ("experts",):
            shape = shape[0] * mesh.size // expert_shards, *shape[1:]
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

    def placed(parameter: Any, names: tuple[str | None, ...]) -> Any:
        return jax.tree.map(place, parameter, stored(parameter).axes(names))

    return jax.tree.map(placed, params, axes, is_leaf=is_weight)
