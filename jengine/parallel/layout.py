"""How a model lies over devices: the sizes of the mesh's axes."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.base.options import check_whole

# the options that set the sizes
OPTIONS = {"stages": "pipeline_parallel_size", "data": "data_parallel_size", "tensor": "tensor_parallel_size"}


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of devices for each axis.

    Attributes:
        stages: groups of devices, each with some of the layers.
        data: groups of devices within a stage that compute different sequences.
        tensor: devices that share each matrix and the cache of each sequence.
        expert_parallel: whole experts are divided among all devices of a stage. Otherwise each expert is
            divided among the devices of `tensor`.

    Raises:
        InvalidArgument: a size is not a whole number of at least 1.
    """

    stages: int = 1
    data: int = 1
    tensor: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        for field, option in OPTIONS.items():
            check_whole(option, getattr(self, field), 1, None)

    @property
    def devices(self) -> int:
        """All devices."""
        return self.stages * self.stage_devices

    @property
    def stage_devices(self) -> int:
        """Devices of each stage."""
        return self.data * self.tensor

    @property
    def expert_shards(self) -> int:
        """Devices among which the experts of a layer are divided; 1: each has all of them, or a part of
        each.
        """
        return self.stage_devices if self.expert_parallel else 1

    def __str__(self) -> str:
        return ", ".join(
            f"{option}={size}" for field, option in OPTIONS.items() if (size := getattr(self, field)) > 1
        )
