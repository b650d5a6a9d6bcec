"""`jengine plan`: whether a model fits a GPU that is not there, how many sequences it then serves, and how fast at most."""

from __future__ import annotations

import argparse

from jengine import EngineConfig
from jengine.commands.compile import SKIPS, add_target, config_for
from jengine.commands.flags import add_fields, add_model
from jengine.commands.terminal import write


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory, sequences and speed bounds of a model on a GPU",
        description="Print what a model takes of a GPU's memory, how many sequences fit, and the speed that the hardware allows:\n"
        "from config.json and the device's data sheet alone. The exit code is 1 if it does not fit.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_target(parser, required=True)
    parser.add_argument("--exact", action="store_true", help="compile the largest programs, to know their memory (needs the extra aot)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=SKIPS)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    config = config_for(options)
    from jengine.planning.plan import make_plan
    from jengine.planning.report import report

    plan = make_plan(config, options.target, exact=options.exact, progress=not options.quiet)
    write(report(options.model, plan) + "\n")
    return 0 if plan.fits else 1
