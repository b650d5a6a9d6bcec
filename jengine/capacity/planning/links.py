"""Seconds of collectives, by what they wait for: links inside a host, links between hosts, and starting.

A collective of a group over several hosts is hierarchical: devices of a host first reduce, then each
exchanges its share with its peers on other hosts, and then they gather. So each device's network adapter
moves its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jengine.base.errors import InvalidArgument
from jengine.devices.device_spec import DeviceSpec
from jengine.parallel.layout import Layout

# Seconds of small messages: to start a collective, and for each step of its ring. NCCL uses the
# same figures to choose algorithms (2.28, src/graph/tuning.cc: ring, protocol LL).
START, NVLINK_STEP, PCIE_STEP, NETWORK_STEP = 6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6
# XLA's kernels (jaxlib 0.12) sum up to so many bytes, over the number of devices, in one shot or in two.
ONE_SHOT_BYTES, TWO_SHOT_BYTES = 2 << 20, 32 << 20
# Seconds of small sums: those of such kernels in vLLM's issues 24532, 37756 and 42324, to 15 %.
ONE_SHOT, TWO_SHOT = 7.0e-6, 10.5e-6
PER_HOST = 8  # devices of a host, unless the number of hosts is given


class Seconds(NamedTuple):
    """Attributes: links: inside a host; network: between hosts; latency: of a message without bytes."""

    links: float = 0.0
    network: float = 0.0
    latency: float = 0.0

    def __mul__(self, times: float) -> Seconds:  # type: ignore[override]
        return Seconds(*[times * part for part in self])

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*[a + b for a, b in zip(self, other, strict=True)])


class Group(NamedTuple):
    """The devices of a collective: `devices` in all, equally many on each of `hosts`."""

    devices: int
    hosts: int

    @property
    def per_host(self) -> int:
        return self.devices // self.hosts


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices on equal hosts.

    Attributes:
        kernels: small sums use XLA's kernels, where these are faster than NCCL. XLA has them for 2, 4 or 8
            devices of a host with NVLink, from Hopper on.

    Raises:
        InvalidArgument: the hosts cannot have equally many, or the speed of the network is unknown.
    """

    device: DeviceSpec
    count: int
    hosts: int
    kernels: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.count or self.count % self.hosts:
            raise InvalidArgument("hosts", self.hosts, f"must divide {self.count}, the number of devices")
        if self.hosts > 1 and not self.device.network:
            limit = f"must be given: it is unknown for {self.device.name}, and there are {self.hosts} hosts"
            raise InvalidArgument("network", None, limit)

    @classmethod
    def of(cls, device: DeviceSpec, count: int, hosts: int | None = None) -> Cluster:
        """hosts: None: hosts of PER_HOST devices."""
        return cls(device, count, -(-count // PER_HOST) if hosts is None else hosts)

    @property
    def per_host(self) -> int:
        return self.count // self.hosts

    # --- groups of a layout: replicas are the outermost axis, then stages, data and tensor ----------------

    def tensor_group(self, layout: Layout) -> Group:
        return Group(layout.tensor, -(-layout.tensor // self.per_host))

    def data_group(self, layout: Layout) -> Group:
        if layout.tensor >= self.per_host:
            return Group(layout.data, layout.data)
        return Group(layout.data, -(-layout.stage_devices // self.per_host))

    def borders(self, layout: Layout) -> int:
        """Borders between stages that are borders between hosts, too."""
        return min(layout.stages, -(-layout.devices // self.per_host)) - 1

    # --- collectives -------------------------------------------------------------------------------------

    def all_reduce(self, size: float, group: Group) -> Seconds:
        """Time to sum `size` bytes over the devices. In a ring (NCCL) or in two shots, each device sends its
        share to every other one, and then the sum; in one shot it sends all.
        """
        half, count = self.gather(size, group), group.devices
        ring = Seconds(2 * half.links, 2 * half.network, max(0.0, 2 * half.latency - START))
        if not self.has_kernels(group) or size * count > TWO_SHOT_BYTES:
            return ring
        kernel = Seconds(ring.links, latency=TWO_SHOT)
        if size * count <= ONE_SHOT_BYTES:
            kernel = Seconds(size * (count - 1) / self.device.link, latency=ONE_SHOT)
        return min(ring, kernel, key=sum)

    def has_kernels(self, group: Group) -> bool:
        """Whether small sums of the group use XLA's kernels."""
        hopper = float(self.device.capability) >= 9
        joined = hopper and group.hosts == 1 and "NVLink" in self.device.link_name
        return self.kernels and joined and group.devices in (2, 4, 8)

    def gather(self, size: float, group: Group) -> Seconds:
        """An all-gather to `size` bytes on each device, or a reduce-scatter of them, or an all-to-all."""
        if group.devices == 1:
            return Seconds()
        here, device = group.per_host, self.device
        step = NVLINK_STEP if "NVLink" in device.link_name else PCIE_STEP
        return Seconds(
            links=size * (here - 1) / here / device.link,
            network=0.0 if group.hosts == 1 else size / here * (1 - 1 / group.hosts) / device.network,
            latency=START + (here - 1) * step + (group.hosts - 1) * NETWORK_STEP,
        )

    def send(self, size: float, *, between_hosts: bool) -> Seconds:
        """From one device to its peer in the next stage."""
        if between_hosts:
            return Seconds(network=size / self.device.network, latency=START + NETWORK_STEP)
        step = NVLINK_STEP if "NVLink" in self.device.link_name else PCIE_STEP
        return Seconds(links=size / self.device.link, latency=START + step)
