"""`jengine plan`: memory, number of sequences, speed and layouts of a model on GPUs that need not be present,
or its
memory and measured step costs on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import EngineConfig, InvalidArgument
from jengine.commands.compile import SKIPS, add_target, config_for
from jengine.commands.flags import add_flags, add_model, refuse
from jengine.commands.terminal import note, write, write_json
from jengine.vllm.flags import add_fields, add_vllm_flags
from jengine.vllm.settings import ENGINE

if TYPE_CHECKING:
    from jengine.capacity.planning.links import Cluster
    from jengine.capacity.planning.traffic import Traffic
    from jengine.devices.device_spec import DeviceSpec

TRAFFIC = "1024/1024"
MOST_DEVICES = 1024
OF_LAYOUTS = ("hosts", "link", "network", "traffic", "target_ttft_ms", "target_tpot_ms")  # need --devices
FIGURES = ("memory", "bandwidth", "compute")


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory, sequences, speed and layouts of a model on GPUs, or what its steps cost here",
        description=(
            "Print a model's use of a GPU's memory, the number of sequences that fit, and its speed: from"
            " config.json, the device's data\nsheet, and measured shares of it. With --devices, compare the"
            " layouts"
            " of several devices. Without --target, print the memory\non this machine, and the step costs"
            " that"
            " engines with the same options have measured here. The exit code is 1 if the model\ndoes not"
            " fit, or"
            " no layout meets the targets."
        ),
    )
    add_model(parser)
    add_target(parser, "such as h100, l4 or rtx4090; an unknown name prints all (default: this machine)")
    figures = parser.add_argument_group(
        "device", "Figures of another device, or instead of those of --target."
    )
    add_flags(
        figures,
        ("--memory", "SIZE", "such as 24GiB"),
        ("--bandwidth", "RATE", "of the memory, such as 1.0TB/s"),
        ("--compute", "RATE", "of products of 16 bits, dense, such as 165TFLOPS"),
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="compile the largest programs to get their exact memory (needs the extra aot)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_layouts(parser)
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=SKIPS)
    add_vllm_flags(parser, ENGINE, note)
    parser.set_defaults(run=_plan)


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "layouts",
        "With --devices, compare the ways to spread the model over these devices for this traffic: pipeline"
        " stages,"
        " data-parallel attention, experts that lie whole, tensor parallelism, replicas. With"
        " --tensor-parallel-size"
        " or other sizes, only that layout is computed.",
    )
    add_flags(
        group,
        ("--devices", "N", "number of devices"),
        ("--hosts", "N", "machines that have these devices (default: one for each 8)"),
        ("--link", "RATE", "at which a device sends to others of its host, such as 450GB/s"),
        (
            "--network",
            "RATE",
            "at which a device sends to other hosts, such as 50GB/s (default: as in NVIDIA's DGX)",
        ),
        (
            "--traffic",
            "PROMPT/OUTPUT",
            f"tokens of prompts and outputs, or a trace's means (default: {TRAFFIC})",
        ),
        ("--target-ttft-ms", "NUMBER", "most milliseconds to the first token"),
        ("--target-tpot-ms", "NUMBER", "most milliseconds for each further token"),
    )


def _plan(options: argparse.Namespace) -> int:
    figures = [getattr(options, name) for name in FIGURES]
    if options.target is None and not any(figures):
        return _local(options)
    if options.devices is None:
        refuse(options, OF_LAYOUTS, "needs --devices")
    config = config_for(options)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a plan needs no local GPU
    from jengine.capacity.planning.plan import make_plan, plan_layouts
    from jengine.capacity.planning.report import plain, report
    from jengine.devices.device_spec import custom_device

    device = custom_device(options.target, *figures)
    if options.devices is None:
        plan = make_plan(config, device, exact=options.exact, progress=not options.quiet)
    else:
        refuse(options, ("exact",), "cannot be combined with --devices")
        from jengine.capacity.planning.layouts import EXPERTS, choose
        from jengine.parallel.layout import OPTIONS

        chosen = {*OPTIONS.values(), EXPERTS}.intersection(vars(options))
        only = config.layout if chosen else None
        plan = plan_layouts(choose(config, _cluster(options, device), _traffic(options), only=only))
    if options.json:
        write_json({"model": options.model, **plain(plan)})
    else:
        write(report(options.model, plan) + "\n")
    return 0 if plan.fits else 1


def _local(options: argparse.Namespace) -> int:
    """The memory that an engine takes on this machine, and the costs that engines have measured on it."""
    refuse(options, ("exact", "devices", *OF_LAYOUTS), "needs --target NAME, such as --target h100")
    config = config_for(options)
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jengine.capacity.planning.memory import fits, local_room
    from jengine.capacity.planning.report import local_report
    from jengine.engine.setup.program_set import saved_costs
    from jengine.engine.setup.shapes import describe_engine

    spec, memory, pages = local_room(config)
    costs = saved_costs(*describe_engine(config))
    enough = fits(memory, pages)
    if options.json:
        values: dict[str, Any] = {"fits": enough, "pages": pages, "memory": dataclasses.asdict(memory)}
        measured = None if costs is None else json.loads(costs.to_json())
        write_json({"model": options.model, **values, "costs": measured})
    else:
        write(local_report(options.model, spec, memory, pages, costs) + "\n")
    return 0 if enough else 1


def _cluster(options: argparse.Namespace, device: DeviceSpec) -> Cluster:
    """The devices.

    Raises:
        InvalidArgument: a value out of range.
    """
    from jengine.capacity.planning.links import Cluster
    from jengine.devices.device_spec import parse_rate

    if not 1 <= options.devices <= MOST_DEVICES:
        raise InvalidArgument("devices", options.devices, f"must be from 1 to {MOST_DEVICES}")
    link, network = (parse_rate(name, getattr(options, name), "B/s") for name in ("link", "network"))
    if link is not None:
        device = dataclasses.replace(device, link=link, link_name=f"{device.link_name}, given")
    if network is not None:
        device = dataclasses.replace(device, network=network, network_name="given")
    return Cluster.of(device, options.devices, options.hosts)


def _traffic(options: argparse.Namespace) -> Traffic:
    """The traffic of --traffic, and the targets: PROMPT/OUTPUT tokens, or the means of a trace.

    Raises:
        InvalidArgument: it is neither.
    """
    from jengine.capacity.planning.traffic import Traffic

    text = options.traffic or TRAFFIC
    prompt, _, output = text.partition("/")
    if prompt.isdecimal() and output.isdecimal():
        lengths = int(prompt), int(output)
    elif Path(text).is_file():
        from jengine.capacity.simulation.trace import read_trace

        trace = read_trace(text)
        lengths = round(trace.prompts.mean()), round(trace.outputs.mean())
    else:
        limit = "must be tokens of prompts and outputs, such as 1024/256, or the file of a trace"
        raise InvalidArgument("traffic", text, limit)
    return Traffic(
        prompt=lengths[0], output=lengths[1], ttft_ms=options.target_ttft_ms, tpot_ms=options.target_tpot_ms
    )
