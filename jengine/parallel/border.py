"""Arrays that pass from the devices of a stage to those of the next one, in another process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

STAGE = "stage"


class Border:
    """Programs of one permutation over the devices of two stages, which all of their processes call in the
    same order. A process without the array passes zeros in its place.

    Args:
        before, behind: the meshes of the stages.
        shapes: shapes of the arrays, which are whole on each device of a stage.
    """

    def __init__(
        self, before: Mesh, behind: Mesh, shapes: Iterable[tuple[int, int]], dtype: jax.typing.DTypeLike
    ) -> None:
        devices = np.stack([before.devices.flatten(), behind.devices.flatten()])
        mesh = Mesh(devices, (STAGE, "copy"), axis_types=(AxisType.Auto,) * 2)
        self._sharding = NamedSharding(mesh, PartitionSpec(STAGE))
        self._target = NamedSharding(behind, PartitionSpec())
        mine = jax.process_index()
        self._from, self._to = (
            [device for device in row if device.process_index == mine] for row in devices.tolist()
        )
        self._programs = {shape: self._compiled(shape, dtype) for shape in {*shapes}}
        self._zeros = {
            shape: [jax.device_put(jnp.zeros(shape, dtype), device) for device in self._to]
            for shape in self._programs
        }

    def _compiled(self, shape: tuple[int, int], dtype: jax.typing.DTypeLike) -> jax.stages.Compiled:
        passing = partial(lax.ppermute, axis_name=STAGE, perm=[(0, 1)])
        spec = self._sharding.spec
        mapped = jax.shard_map(
            passing, mesh=self._sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        both = jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]), dtype, sharding=self._sharding)
        return jax.jit(mapped).lower(both).compile()

    def passed(self, array: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
        """The array on this process's devices of the stage behind; None if it has none of them.

        Args:
            array: None if this process has no devices of the stage before.
        """
        given = {} if array is None else {part.device: part.data for part in array.addressable_shards}
        parts = [*[given[device] for device in self._from], *self._zeros[shape]]
        both = jax.make_array_from_single_device_arrays((2 * shape[0], *shape[1:]), self._sharding, parts)
        moved = {part.device: part.data for part in self._programs[shape](both).addressable_shards}
        if not self._to:
            return None
        mine = [moved[device] for device in self._to]
        return jax.make_array_from_single_device_arrays(shape, self._target, mine)
