"""Data sheets by name, and devices that are described by their figures."""

from __future__ import annotations

import pytest

from jengine.base.errors import InvalidArgument
from jengine.devices.device_spec import custom_device, device_spec, known_devices, parse_rate
from pallas_kernels.compilation.ahead_of_time import targets


def test_every_sheet_is_complete() -> None:
    for name in known_devices():
        device = device_spec(name)
        assert {"float32", "float16", "bfloat16", "int8"} <= device.rates.keys(), name
        assert (
            14 << 30 < device.memory < 200 << 30 and 1e11 < device.bandwidth < 1e13 and device.cores >= 40
        ), name
        assert ("float8_e4m3fn" in device.rates) == (float(device.capability) >= 8.9), name
        assert device.target == (name if name in targets() else "")
    assert {*targets()} <= {*known_devices()}


@pytest.mark.parametrize("name", ["H100", "h100", "NVIDIA H100"])
def test_names_in_any_case(name: str) -> None:
    assert device_spec(name) == device_spec("h100")
    assert device_spec("NVIDIA GeForce RTX 4090").name == "NVIDIA GeForce RTX 4090"


def test_figures_instead_of_a_name() -> None:
    device = custom_device(None, "24GiB", "1.0TB/s", "165TFLOPS")
    assert (device.memory, device.bandwidth, device.rates["bfloat16"], device.rates["int8"]) == (
        24 << 30,
        1e12,
        165e12,
        330e12,
    )
    changed = custom_device("h100", "96GiB", None, None)
    assert (changed.memory, changed.bandwidth, changed.rates) == (
        96 << 30,
        device_spec("h100").bandwidth,
        device_spec("h100").rates,
    )
    assert changed.target == "", "its programs would be for another device"
    assert custom_device("h100", None, None, "98.95TFLOPS").rates["float8_e4m3fn"] == pytest.approx(197.9e12)
    assert custom_device("L4", None, None, None) == device_spec("l4")
    with pytest.raises(InvalidArgument, match="compute=None: must be given"):
        custom_device(None, "24GiB", "1TB/s", None)


def test_rates() -> None:
    for text in ("1TB/s", "1.0 TB/s", "1000GB/s", "1e12", "1000000000000", "1T", "1tb/s"):
        assert parse_rate("bandwidth", text, "B/s") == 1e12
    assert (
        parse_rate("compute", "0.165 PFLOPS", "FLOPS")
        == parse_rate("compute", "165TFLOP/s", "FLOPS")
        == 165e12
    )
    for text in ("fast", "0TB/s", "-1TB/s", "1 TFLOPS", ""):
        with pytest.raises(InvalidArgument, match=r"bandwidth=.*such as 1\.0TB/s"):
            parse_rate("bandwidth", text, "B/s")
