"""Data sheets of devices, which need not be present."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.base.options import parse_bytes
from pallas_kernels.compilation.ahead_of_time import description, targets

MIB = 1 << 20
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
DEFAULT_CAPABILITY = "8.9"  # of a device that is described by figures only: a common one that has kernels


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
        network: bytes a second that it can send to other hosts; 0: unknown.
        target: the name under which programs can be compiled for it without one; "" if they cannot.
        bandwidth_share, products_share: parts of `bandwidth` and `rates` that steps of an engine reach. The
            defaults are the lowest that were measured on any device.
        measured: where they were measured; "": not on this device.
    """

    name: str
    capability: str
    memory: int
    bandwidth: float
    rates: dict[str, float]
    link: float
    link_name: str
    cores: int
    network: float = 0.0
    network_name: str = ""
    target: str = ""
    bandwidth_share: float = 0.70
    products_share: float = 0.585
    measured: str = ""


def known_devices() -> list[str]:
    """Names of the devices that `device_spec` knows."""
    return sorted(_sheets())


def device_spec(target: str) -> DeviceSpec:
    """The data sheet of a device such as 'h200'. Case, spaces and dashes do not matter, nor does a leading
    "nvidia".

    Raises:
        InvalidArgument: the name is unknown.
    """
    names = {_plain(name): name for name in _sheets()}
    name = names.get(_plain(target).removeprefix("nvidia").removeprefix("geforce"))
    if name is None:
        other = "; for another device, give --memory, --bandwidth and --compute"
        raise InvalidArgument("target", target, f"must be one of {', '.join(known_devices())}{other}")
    sheet: dict[str, Any] = _sheets()[name]
    if name in targets():
        return DeviceSpec(**{**_described(name), **sheet, "target": name})
    return DeviceSpec(**{**sheet, "memory": sheet["memory"] * MIB})


def custom_device(
    target: str | None, memory: str | None, bandwidth: str | None, compute: str | None
) -> DeviceSpec:
    """The device of this name with other figures, or one that is described by figures only.

    Args:
        memory: such as 24GiB; bandwidth: such as 1.0TB/s; compute: operations a second in 16 bits, such as
            165TFLOPS. The rates of other dtypes follow those of a known device; of an unknown one, eight bits
            are twice as fast.

    Raises:
        InvalidArgument: the name is unknown, a figure is no number with a known unit, or one is missing.
    """
    figures = {"memory": memory, "bandwidth": bandwidth, "compute": compute}
    if target is None and (missing := [name for name, figure in figures.items() if figure is None]):
        raise InvalidArgument(
            missing[0],
            None,
            "must be given, as --memory, --bandwidth and --compute describe a device without --target",
        )
    bytes_, moved = parse_bytes("memory", memory), parse_rate("bandwidth", bandwidth, "B/s")
    operations = parse_rate("compute", compute, "FLOPS")
    if target is None:
        assert bytes_ is not None and moved is not None and operations is not None
        rates = dict.fromkeys(("float32", "float16", "bfloat16"), operations) | dict.fromkeys(
            ("int8", "float8_e4m3fn"), 2 * operations
        )
        return DeviceSpec("custom GPU", DEFAULT_CAPABILITY, bytes_, moved, rates, 32e9, "PCIe 4 x16", 128)
    known = device_spec(target)
    if figures == dict.fromkeys(figures):
        return known
    faster = 1.0 if operations is None else operations / known.rates["float16"]
    return dataclasses.replace(
        known,
        name=f"{known.name}, changed",
        memory=bytes_ or known.memory,
        bandwidth=moved or known.bandwidth,
        rates={dtype: rate * faster for dtype, rate in known.rates.items()},
        target="",
        measured="",
    )


def parse_rate(name: str, value: str | None, unit: str) -> float | None:
    """Parses a number with a prefix and this unit, which may be left out: 1.0TB/s, 936 GB/s, 165TFLOPS, 165T.

    Raises:
        InvalidArgument: it is something else.
    """
    if value is None:
        return None
    units = "|".join(map(re.escape, (unit, *(("FLOP/s", "OPS") if unit == "FLOPS" else ()))))
    match = re.fullmatch(rf"\s*(\d+\.?\d*(?:e\d+)?)\s*([KMGTP]?)(?:{units})?\s*", str(value), re.IGNORECASE)
    if match is None or not float(match[1]) > 0:
        raise InvalidArgument(
            name,
            value,
            f"must be a number with a unit, such as {'1.0TB/s' if unit == 'B/s' else '165TFLOPS'}",
        )
    return float(match[1]) * UNITS[match[2].upper()]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


@cache
def _sheets() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "gpus.toml").read_text())


def _described(target: str) -> dict[str, Any]:
    """What XLA's description of a device says."""
    text = description(target)

    def field(name: str) -> str:
        [value] = re.findall(rf'^\s*{name}: "?([^"\n]+)', text, re.MULTILINE)
        return str(value)

    [(major, minor)] = re.findall(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", text)
    return {
        "name": field("name"),
        "capability": f"{major}.{minor or 0}",
        "memory": int(field("device_memory_size")),
        "bandwidth": float(field("memory_bandwidth")),
        "cores": int(field("core_count")),
    }
