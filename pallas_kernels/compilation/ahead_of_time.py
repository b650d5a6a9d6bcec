"""Compiles programs for an absent GPU.

This needs the extra `aot` (JAX's CUDA plugin and NVIDIA's compiler), but no GPU and no driver.
JAX_PLATFORMS=cpu must be set in the environment, or the plugin looks for all of CUDA. A process compiles
Mosaic kernels for one compute capability, its first (jax 0.12).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

TARGETS = Path(__file__).parent / "targets"
PLANNED = 80  # percent of the described memory that XLA plans with where there is no device to ask


def targets() -> list[str]:
    """Names of the devices for which there are files."""
    return sorted(file.stem for file in TARGETS.glob("*.txtpb"))


def description(target: str) -> str:
    """XLA's description of a device, such as 'h200': a GpuTargetConfigProto as text.

    Raises:
        ValueError: there is no file for it in `targets`.
    """
    if target not in targets():
        raise ValueError(f"target={target!r}: must be one of {', '.join(targets())}")
    return (TARGETS / f"{target}.txtpb").read_text()


def target_of(device: jax.Device) -> str | None:
    """The target that describes this GPU; None: there is none, such as for a part of a GPU."""
    names = {
        re.search(r'^device_description_str: "(.*)"', text, re.MULTILINE)[1]: target  # type: ignore[index]
        for target in targets()
        if f"core_count: {getattr(device, 'core_count', None)}\n" in (text := description(target))
    }
    return names.get(device.device_kind)


def devices(target: str, count: int, memory: int | None = None) -> list[jax.Device]:
    """Devices of one host, such as 'h200', to compile for.

    Args:
        memory: bytes of each device for a program with its arguments. Programs that have less left for
            temporaries than they need compute results again instead of keeping them. None: XLA's choice,
            PLANNED percent of the memory.

    Raises:
        ValueError: there is no file for it in `targets`.
    """
    text = description(target)
    if memory is not None:
        text = re.sub(r"device_memory_size: \d+", f"device_memory_size: {-(-memory * 100 // PLANNED)}", text)
    return list(
        topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=text).devices
    )


def device(target: str) -> jax.Device:
    """A device of the target."""
    return devices(target, 1)[0]


def lower_for(
    device: jax.Device, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Lowered:
    """Lowers a function for the device.

    Args:
        args: trees of arrays or abstract arrays.
        donate: positions of donated arguments.
    """
    whole = NamedSharding(jax.sharding.Mesh([device], ("x",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    with jax.default_device(device):  # Mosaic uses this device's compute capability for the target
        return jax.jit(function, donate_argnums=donate).lower(*placed)
