"""`jengine plan`: memory, number of sequences and speed bounds of a model on an absent GPU, or measured step
costs here."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from jengine import EngineConfig, InvalidArgument, JengineError
from jengine.commands.arguments import add_vllm_flags
from jengine.commands.compile import SKIPS, add_target, config_for
from jengine.commands.flags import add_fields, add_model
from jengine.commands.layout_flags import (
    add_devices,
    add_targets,
    cluster_from_flags,
    given_layout,
    traffic_from_flags,
)
from jengine.commands.terminal import note, write
from jengine.vllm.engine_settings import ENGINE

TRAFFIC = "1024/1024"
# flags that need --devices
OF_LAYOUTS = ("hosts", "link", "network", "traffic", "target_ttft_ms", "target_tpot_ms", "json", "plot")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory, sequences and speed bounds of a model on a GPU; or what its steps cost here",
        description=(
            "Print a model's use of a GPU's memory, the number of sequences that fit, and bounds on its"
            " speed:\nfrom config.json and the device's data sheet alone. The exit code is 1 if it does not"
            " fit. With --devices, compare\nlayouts of several devices. With --costs, print step costs that"
            " engines with the same options have measured on\nthis machine; the exit code is 1 if there are"
            " none."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_target(
        parser,
        "such as h100, l4 or rtx4090; an unknown name prints all (required without --costs or the following"
        " three)",
    )
    figures = parser.add_argument_group(
        "device", "Figures of another device, or instead of those of --target."
    )
    figures.add_argument("--memory", metavar="SIZE", help="such as 24GiB")
    figures.add_argument("--bandwidth", metavar="RATE", help="of the memory, such as 1.0TB/s")
    figures.add_argument("--compute", metavar="RATE", help="of products of 16 bits, dense, such as 165TFLOPS")
    parser.add_argument(
        "--costs",
        action="store_true",
        help="print measured costs of steps on this machine, instead of a plan",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="compile the largest programs to get their exact memory (needs the extra aot)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_devices(
        parser,
        "With --devices, print what each layout of these devices serves at most, and which is best: pipeline"
        " stages, data-parallel attention, experts that lie whole, tensor parallelism, replicas. The exit"
        " code is 1 if none meets the targets. With --tensor-parallel-size, only that layout.",
    )
    parser.add_argument(
        "--traffic",
        metavar="PROMPT/OUTPUT",
        help="with --devices: tokens of prompts and outputs, or a trace (default: 1024/1024)",
    )
    add_targets(parser)
    parser.add_argument("--json", action="store_true", help="with --devices: print one JSON object")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="with --devices: plot throughput against time per token (needs the extra bench)",
    )
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=SKIPS)
    add_vllm_flags(parser, ENGINE, note)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    if options.costs:
        return _costs(options)
    figures = [options.memory, options.bandwidth, options.compute]
    if options.devices is not None:
        return _layouts(options, figures)
    for name in OF_LAYOUTS:
        if getattr(options, name):
            raise InvalidArgument(name, getattr(options, name), "needs --devices")
    if options.target is None and not any(figures):
        raise JengineError(
            "plan needs --target NAME, such as --target h100; or --memory, --bandwidth and --compute; or"
            " --devices; or --costs"
        )
    config = config_for(options)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a plan needs no local GPU
    from jengine.capacity.planning.plan import make_plan
    from jengine.capacity.planning.report import report
    from jengine.devices.device_spec import custom_device

    plan = make_plan(
        config, custom_device(options.target, *figures), exact=options.exact, progress=not options.quiet
    )
    write(report(options.model, plan) + "\n")
    return 0 if plan.fits else 1


def _layouts(options: argparse.Namespace, figures: list[str | None]) -> int:
    for name in ("target", "exact"):
        if getattr(options, name):
            raise InvalidArgument(name, getattr(options, name), "cannot be combined with --devices")
    config = config_for(options)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jengine.capacity.layouts.choice import choose
    from jengine.capacity.layouts.report import plain, report, save_plot

    cluster = cluster_from_flags(options, *figures)
    options.traffic = options.traffic or TRAFFIC
    only = given_layout(config, vars(options))
    choice = choose(config, options.model, cluster, traffic_from_flags(options), only=only)
    write((json.dumps(plain(choice)) if options.json else report(choice)) + "\n")
    if options.plot is not None:
        save_plot(options.plot, choice)
    return 0 if choice.best else 1


def _costs(options: argparse.Namespace) -> int:
    for name in ("target", "exact", "memory", "bandwidth", "compute", "devices", *OF_LAYOUTS):
        if getattr(options, name):
            raise InvalidArgument(
                name,
                getattr(options, name),
                "cannot be combined with --costs, which are measured on this machine",
            )
    config = config_for(options)
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jengine.engine.setup.program_set import saved_costs
    from jengine.engine.setup.shapes import describe_engine
    from jengine.insight.recording.cost_report import cost_report

    costs = saved_costs(*describe_engine(config))
    if costs is None:
        write(
            f"{options.model}: nothing has been measured with these options on this machine. An engine does"
            " so at its first start.\n"
        )
        return 1
    write(f"{cost_report(costs)}\n")
    return 0
