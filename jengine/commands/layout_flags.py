"""Flags that describe devices and traffic, for `plan` and `simulate`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jengine import EngineConfig, InvalidArgument

if TYPE_CHECKING:
    from jengine.capacity.layouts.links import Cluster
    from jengine.capacity.layouts.serving import Traffic
    from jengine.parallel.layout import Layout


def add_devices(parser: argparse.ArgumentParser, what: str) -> None:
    """--devices, --hosts, --link and --network. what: what the command then does."""
    group = parser.add_argument_group("layouts", what)
    group.add_argument("--devices", metavar="COUNTxNAME", help="such as 8xH200")
    group.add_argument(
        "--hosts", metavar="N", type=int, help="machines that have these devices (default: one for each 8)"
    )
    group.add_argument(
        "--link", metavar="RATE", help="at which a device sends to others of its host, such as 450GB/s"
    )
    group.add_argument(
        "--network",
        metavar="RATE",
        help="at which a device sends to other hosts, such as 50GB/s (default: as in NVIDIA's DGX)",
    )


def add_targets(parser: argparse.ArgumentParser) -> None:
    """--target-ttft-ms and --target-tpot-ms."""
    parser.add_argument(
        "--target-ttft-ms", metavar="NUMBER", type=float, help="milliseconds to the first token"
    )
    parser.add_argument(
        "--target-tpot-ms",
        metavar="NUMBER",
        type=float,
        help="mean milliseconds for each further output token",
    )


def cluster_from_flags(options: argparse.Namespace, *figures: str | None) -> Cluster:
    """The devices.

    Args:
        figures: memory, bandwidth and compute that replace those of the device.

    Raises:
        InvalidArgument: an unknown device, or a value out of range.
    """
    from jengine.capacity.layouts.links import Cluster, parse_devices
    from jengine.devices.device_spec import custom_device, parse_rate

    count, name = parse_devices(options.devices)
    device = custom_device(name, *(figures or (None, None, None)))
    link, network = (parse_rate(name, getattr(options, name), "B/s") for name in ("link", "network"))
    if link is not None:
        device = dataclasses.replace(device, link=link, link_name=f"{device.link_name}, given")
    if network is not None:
        device = dataclasses.replace(device, network=network, network_name="given")
    return Cluster.of(device, count, options.hosts)


def given_layout(config: EngineConfig, given: Iterable[str]) -> Layout | None:
    """The layout of the engine's options, if any of them is among those given."""
    from jengine.capacity.layouts.deployment import EXPERTS
    from jengine.parallel.layout import OPTIONS

    return config.layout if {*OPTIONS.values(), EXPERTS}.intersection(given) else None


def traffic_from_flags(options: argparse.Namespace) -> Traffic:
    """The traffic of --traffic, and the targets: PROMPT/OUTPUT tokens, or the means of a trace.

    Raises:
        InvalidArgument: it is neither.
    """
    from jengine.capacity.layouts.serving import Traffic

    prompt, _, output = options.traffic.partition("/")
    if prompt.isdecimal() and output.isdecimal():
        lengths = int(prompt), int(output)
    elif Path(options.traffic).is_file():
        from jengine.capacity.simulation.formats import read_trace

        trace = read_trace(options.traffic)
        lengths = round(trace.prompts.mean()), round(trace.outputs.mean())
    else:
        limit = "must be tokens of prompts and outputs, such as 1024/256, or the file of a trace"
        raise InvalidArgument("traffic", options.traffic, limit)
    return Traffic(
        prompt=lengths[0], output=lengths[1], ttft_ms=options.target_ttft_ms, tpot_ms=options.target_tpot_ms
    )
