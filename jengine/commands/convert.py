"""`jengine convert`: writes a checkpoint that is restored directly onto the devices."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from jengine.commands.flags import add_model
from jengine.commands.terminal import note
from jengine.core.model_options import DTYPES
from jengine.core.quantization import Quantization


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a model as a checkpoint that is restored directly onto the devices",
        description=(
            "Write a model as an Orbax checkpoint, with its parameters in the layout that programs use, and"
            " its tokenizer's\nfiles. DIR can then be used as a model: `jengine generate DIR`, `jengine chat"
            " DIR`. Needs no accelerator, and host\nmemory for a batch of parameters: 64 MiB, and the largest"
            " parameter; with --quantization, for all of them."
        ),
    )
    add_model(parser)
    parser.add_argument("out", metavar="DIR", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="dtype of the stored parameters; auto: the model's dtypes (default: auto)",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help=(
            "quantize weights now instead of at each start; none: convert a GGUF file's four-bit weights to"
            " --dtype (default: keep them)"
        ),
    )
    parser.add_argument(
        "--quantization-group-size",
        type=int,
        choices=(32, 64, 128),
        default=32,
        help="for int4, int4_mixed and w4a8: inputs that share a scale (default: 32)",
    )
    parser.add_argument(
        "--calibration-data",
        metavar="FILE",
        type=Path,
        help="for int4, int4_mixed and w4a8: a text; weights are rounded so that errors cancel on such text",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no closing line")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # otherwise JAX would reserve most of a GPU's memory
    from jengine.checkpoints import convert

    folder = convert(
        options.model,
        options.out,
        revision=options.revision,
        dtype=options.dtype,
        quantization=options.quantization,
        quantization_group_size=options.quantization_group_size,
        calibration_data=options.calibration_data,
        progress=not options.quiet,
    )
    if not options.quiet:
        note(f"wrote {folder}; use it as a model: `jengine generate {folder} PROMPT`")
