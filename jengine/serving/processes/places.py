"""Which devices each of several engine processes of a machine uses."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from jengine import InvalidArgument

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = Path("/sys/devices/system/node")  # of memory, on Linux


class Place(NamedTuple):
    """Where an engine process runs.

    Attributes:
        variables: of its environment, beside the server's.
        cpus: that it may use; empty: those of the server.
    """

    variables: Mapping[str, str] = {}
    cpus: frozenset[int] = frozenset()


ANYWHERE = Place()


def places(count: int, devices: int) -> list[Place]:
    """Places for so many engines. Each gets its own GPUs or, without GPUs, an equal share of the CPUs, if
    there are enough: those of one memory node, or of several, as far as the shares allow. An engine's weights
    and cache then lie in the memory of its node, since Linux takes memory from the node of the thread that
    first writes to it.

    Args:
        devices: GPUs of an engine.

    Raises:
        InvalidArgument: there are GPUs, but not enough.
    """
    if count == 1:
        return [ANYWHERE]
    if gpus := _gpus():
        if len(gpus) < count * devices:
            needed = f"with {devices} GPUs for each it needs {count * devices}"
            raise InvalidArgument("data_parallel_size", count, f"{needed}; {len(gpus)} are visible")
        each = [gpus[i * devices : (i + 1) * devices] for i in range(count)]
        return [Place({VISIBLE: ",".join(names)}) for names in each]
    cpus = _by_node(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cpus) // count
    return [Place(cpus=frozenset(cpus[i * share : (i + 1) * share])) for i in range(count)]


def _gpus() -> list[str]:
    """NVIDIA's GPUs that this process may use."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(i) for i in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]


def _by_node(cpus: Collection[int]) -> list[int]:
    """The CPUs, those of a memory node together: numbers alternate between nodes on many machines."""
    nodes: dict[int, int] = {}
    for number, file in enumerate(sorted(NODES.glob("node[0-9]*/cpulist"))):
        for first, _, last in (part.partition("-") for part in file.read_text().strip().split(",") if part):
            nodes |= dict.fromkeys(range(int(first), int(last or first) + 1), number)
    return sorted(cpus, key=lambda cpu: (nodes.get(cpu, 0), cpu))
