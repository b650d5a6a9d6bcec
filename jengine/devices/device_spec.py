"""Data sheets of devices, which need not be present."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

from pallas_kernels.ahead_of_time import TARGETS, description


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's data sheet.

    Attributes:
        capability: compute capability, such as "9.0".
        memory: bytes.
        bandwidth: memory bandwidth in bytes a second.
        rates: operations a second of dense matrix products, by dtype.
        link: bytes a second that it can send to other devices of its host.
        cores: number of multiprocessors.
    """

    name: str
    capability: str
    memory: int
    bandwidth: float
    rates: dict[str, float]
    link: float
    link_name: str
    cores: int


def device_spec(target: str) -> DeviceSpec:
    """The data sheet of a device such as 'h200'.

    Raises:
        ValueError: there are no files for it.
    """
    text = description(target)

    def field(name: str) -> str:
        [found] = re.findall(rf'^\s*{name}: "?([^"\n]+)', text, re.MULTILINE)
        return str(found)

    more = tomllib.loads((TARGETS / "rates.toml").read_text())[target]
    memory, bandwidth = int(field("device_memory_size")), float(field("memory_bandwidth"))
    [(major, minor)] = re.findall(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", text)
    return DeviceSpec(
        field("name"), f"{major}.{minor or 0}", memory, bandwidth, more["rates"], more["link"], more["link_name"], int(field("core_count"))
    )
