"""`jengine plan`: memory, number of sequences and speed bounds of a model on an absent GPU, or measured step
costs here."""

from __future__ import annotations

import argparse
import os

from jengine import EngineConfig, InvalidArgument, JengineError
from jengine.commands.arguments import add_vllm_flags
from jengine.commands.compile import SKIPS, add_target, config_for
from jengine.commands.flags import add_fields, add_model
from jengine.commands.terminal import note, write
from jengine.vllm.engine_settings import ENGINE


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory, sequences and speed bounds of a model on a GPU; or what its steps cost here",
        description=(
            "Print a model's use of a GPU's memory, the number of sequences that fit, and bounds on its"
            " speed:\nfrom config.json and the device's data sheet alone. The exit code is 1 if it does not"
            " fit. With --costs, print step costs\nthat engines with the same options have measured on this"
            " machine; the exit code is 1 if there are none."
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
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=SKIPS)
    add_vllm_flags(parser, ENGINE, note)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    if options.costs:
        return _costs(options)
    figures = [options.memory, options.bandwidth, options.compute]
    if options.target is None and not any(figures):
        raise JengineError(
            "plan needs --target NAME, such as --target h100; or --memory, --bandwidth and --compute; or"
            " --costs"
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


def _costs(options: argparse.Namespace) -> int:
    for name in ("target", "exact", "memory", "bandwidth", "compute"):
        if getattr(options, name):
            raise InvalidArgument(
                name,
                getattr(options, name),
                "cannot be combined with --costs, which are measured on this machine",
            )
    config = config_for(options)
    # the GPU's memory may belong to an engine
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jengine.engine.program_set import saved_costs
    from jengine.engine.shapes import describe_engine
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
