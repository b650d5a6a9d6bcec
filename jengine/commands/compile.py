"""`jengine compile` compiles every program of a model, for the local device or for absent GPUs;
`jengine convert` writes a checkpoint that is restored directly onto the devices.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any, get_args

from jengine import EngineConfig
from jengine.commands.flags import add_flags, add_model
from jengine.commands.terminal import note
from jengine.core.model_options import DTYPES
from jengine.core.quantization import Quantization
from jengine.vllm.flags import add_fields, add_vllm_flags, flag_values
from jengine.vllm.settings import ENGINE

# Options that do not affect programs, or that this command sets.
SKIPS = (
    "model", "tokenizer", "chat_template", "enable_prefix_caching", "policy", "priority_ageing", "strategy",
    "ttft_ms", "tpot_ms",
    "on_late", "batching", "batch_wait_ms", "overlap", "seed", "programs", "cache_max_size",
    "record_trace", "coordinator", "num_processes", "process_id",
)  # fmt: skip
GIB, MIB = 1 << 30, 1 << 20


def add_compile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile a model's programs ahead of time, for a GPU that need not be present",
        description=(
            "Compile every program of a model into a folder, using only its config.json. An engine that is"
            " started with\n--programs DIR on such a device, with the same model, options and versions, loads"
            " them and compiles nothing."
        ),
    )
    add_model(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="the folder to write, new or empty"
    )
    add_target(parser, "h200, h100, a100 or l4 (needs the extra aot; default: the local device)")
    text = "autotuning results that this command saved on a GPU of the target's kind"
    add_flags(parser, ("--autotune", "FILE", text))
    parser.add_argument("--quiet", action="store_true", help="no progress and no closing lines")
    add_fields(parser.add_argument_group("engine"), EngineConfig, skip=SKIPS)
    add_vllm_flags(parser, ENGINE, note)
    parser.set_defaults(run=_compile)


def add_target(parser: argparse.ArgumentParser, names: str) -> None:
    """--target and --tp."""
    parser.add_argument("--target", metavar="NAME", type=str.lower, help=f"the GPU: {names}")
    parser.add_argument(
        "--tp",
        dest="tensor_parallel_size",
        metavar="N",
        type=int,
        default=argparse.SUPPRESS,
        help="short for --tensor-parallel-size",
    )


def config_for(options: argparse.Namespace) -> EngineConfig:
    """The engine's options, validated. Keeps JAX away from local GPUs, which a target does not need."""
    config = EngineConfig.of(options.model, flag_values(options, EngineConfig, skip=SKIPS))
    if options.target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # programs from JAX's own cache cannot be serialized again
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
    return config


def _compile(options: argparse.Namespace) -> None:
    config = config_for(options)
    from jengine.capacity.planning.ahead_of_time import compile_table

    done = compile_table(
        config, options.out, target=options.target, autotune=options.autotune, progress=not options.quiet
    )
    if options.quiet:
        return
    spec = done.spec
    size = sum(done.file_bytes.values()) / MIB
    device = f"{spec.mesh.size} x {spec.mesh.devices.flat[0].device_kind}"
    note(
        f"{options.out}: {len(done.file_bytes)} programs for {device}, {size:.1f} MiB, compiled in"
        f" {done.elapsed:.0f} s"
    )
    note(
        f"the cache has {spec.num_pages} pages of {spec.page_size} tokens, {spec.cache_bytes / GIB:.2f} GiB"
        " on each device"
    )
    if done.autotune is not None:
        note(f"autotuning results: {done.autotune}")
    note("start with " + shlex.join(["jengine", "generate", options.model, "PROMPT", *_flags(options)]))


def _flags(options: argparse.Namespace) -> list[str]:
    """Flags for an engine that uses these programs."""
    values: dict[str, Any] = {
        "programs": options.out,
        **flag_values(options, EngineConfig, skip=(*SKIPS, "compile_threads", "cache_dir")),
    }
    flags = list[str]()
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            flags += [f"--{flag}={item}" for item in value]
        elif value is not None:
            flags.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    when = (
        "quantize weights now instead of at each start; none: convert a GGUF file's four-bit weights to"
        " --dtype (default: keep them)"
    )
    scales = "for int4, int4_mixed and w4a8: inputs that share a scale"
    text = "for int4, int4_mixed and w4a8: a text; weights are rounded so that errors cancel on such text"
    add_flags(
        parser,
        ("--revision", "TEXT", "branch, tag or commit of a hub id"),
        ("--dtype", ("auto", *DTYPES), "dtype of the stored parameters; auto: the model's dtypes", "auto"),
        ("--quantization", get_args(Quantization), when),
        ("--quantization-group-size", (32, 64, 128), scales, 32),
        ("--calibration-data", "FILE", text),
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
