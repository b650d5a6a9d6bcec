"""The ways in which a number of devices can serve a model, and why some cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jengine.parallel.layout import OPTIONS, Layout

EXPERTS = "enable_expert_parallel"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Equal engines, each with 1 / replicas of the sequences, and how the devices of each share the model."""

    layout: Layout
    replicas: int = 1

    @property
    def devices(self) -> int:
        return self.replicas * self.layout.devices

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of an engine with this layout that differ from the defaults."""
        sizes = {OPTIONS[axis]: getattr(self.layout, axis) for axis in OPTIONS}
        whole: dict[str, int | bool] = {EXPERTS: True} if self.layout.expert_parallel else {}
        return {name: size for name, size in sizes.items() if size > 1} | whole

    def unavailable(self, per_host: int) -> str | None:
        """The options that engines do not take together on hosts of so many devices, or None."""
        if self.layout.data > 1 and self.layout.devices > per_host:
            return "data_parallel_size with num_processes"
        return None

    def __str__(self) -> str:
        """Such as 2 stages x tensor 4, 2 replicas."""
        layout = self.layout
        axes = [
            f"{layout.stages} stages" if layout.stages > 1 else "",
            f"data {layout.data}" if layout.data > 1 else "",
            f"tensor {layout.tensor}" if layout.tensor > 1 else "",
        ]
        shared = " x ".join(filter(None, axes)) or "one device"
        whole = ", experts whole" if layout.expert_parallel else ""
        return f"{shared}{whole}" + (f", {self.replicas} replicas" if self.replicas > 1 else "")


def deployments(devices: int, *, experts: bool) -> Iterator[Deployment]:
    """All that use so many devices.

    Without experts, data ranks share nothing, so they are replicas. With experts, they share these, which
    then lie whole.
    """
    for engine in _divisors(devices):
        for stages in _divisors(engine):
            for data in _divisors(engine // stages) if experts else [1]:
                tensor = engine // stages // data
                for whole in (False, True):
                    if whole == (data > 1) or (whole and experts and tensor > 1):
                        yield Deployment(Layout(stages, data, tensor, whole), devices // engine)


def refused(layout: Layout, *, experts: int, per_host: int) -> str | None:
    """Why a model with so many experts cannot have this layout on hosts of so many devices, or None."""
    if layout.expert_shards > max(experts, 1):
        return f"more devices than the model has experts, {experts}"
    for name, size in (("tensor", layout.tensor), ("data x tensor", layout.stage_devices)):
        if size % per_host and per_host % size:
            return f"{name} {size} does not divide hosts of {per_host} devices, nor do they divide it"
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
