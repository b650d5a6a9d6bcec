"""`jengine convert`: a checkpoint that restores straight onto the devices."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jengine.commands.flags import add_model
from jengine.commands.terminal import note
from jengine.config import DTYPES


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a model as a checkpoint that restores straight onto the devices",
        description="Write a model as an Orbax checkpoint, with its parameters as programs take them and its tokenizer's files beside\n"
        "it. DIR then loads as any model: `jengine generate DIR`, `jengine chat DIR`. Needs the memory of the largest\n"
        "parameter, and no accelerator.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    parser.add_argument("out", metavar="DIR", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--revision", metavar="TEXT", help="of a hub id")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="to store parameters in; auto: each as the model has it (default: auto)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no closing line")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX would take most of a GPU's memory, for nothing
    from jengine.checkpoints import convert

    folder = convert(options.model, options.out, revision=options.revision, dtype=options.dtype, progress=not options.quiet)
    if not options.quiet:
        note(f"{folder} is written: it loads as any model, `jengine generate {folder} PROMPT`")
