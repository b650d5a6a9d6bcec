"""Processor seconds of a table of programs for an absent GPU, by kind: lowering and compiling.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu_compile [--parts first second before] [--quick]

Of three tables, each in its own process and with one thread:

- first: that of Qwen3-0.6B with the defaults of a GPU;
- second: trunks of a model with equal heads and as many pages, which take the kernels that the first lowered;
- before: every power of two; each program lowers its kernels, and XLA compiles what it could tune. A few
  programs are compiled; the others of their kind are assumed to take as long.

Results are saved after each part. Needs the extra `aot`. Processor seconds include those of child processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import resource
import shutil
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.machine import ROOT, add
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.execution import programs
from jengine.execution.kernel_objects import keep_lowered
from jengine.execution.kinds import Key
from jengine.execution.programs import UNTUNED, gpu_options, lower, program_keys
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import ProgramTable, SamplerKey, ScoreKey, TrunkKey
from pallas_kernels.compilation import ahead_of_time, lowered

TARGET, PAGES = "h200", 1000
KEPT = ROOT / ".cache" / "gpu_compile"
QWEN3: dict[str, Any] = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_act": "silu", "rope_theta": 1e6},
    **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"},
    **{"tie_word_embeddings": True, "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072},
}
SECOND = {"hidden_size": 2048, "intermediate_size": 6144}  # Qwen3-1.7B
BEFORE: dict[str, list[Key]] = {
    "trunks": [TrunkKey(8, 0), TrunkKey(8, 1), TrunkKey(256, 16)],
    "samplers": [SamplerKey(128, variant) for variant in ("greedy", "sample", "truncated", "full")],
    "scorers": [ScoreKey(8)],
    "others": ["allocate", "allocate-counts", "count", "update", "copy"],
}
KINDS = {TrunkKey: "trunks", SamplerKey: "samplers", ScoreKey: "scorers", str: "others"}


def described(**changes: Any) -> ExecutionSpec:
    options = {"max_num_seqs": 256, "max_model_len": 4096}
    mesh = make_mesh(1, ahead_of_time.devices(TARGET, 1))
    spec = describe(EngineConfig.of("MODEL", options), model_config({**QWEN3, **changes}), mesh, Path())
    return dataclasses.replace(spec, num_pages=PAGES)


def seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def cost(
    spec: ExecutionSpec, key: Key, *, before: bool = False, compiles: bool = True
) -> tuple[float, float]:
    """Processor seconds of lowering and of compiling a program."""
    options = {**gpu_options(spec), **UNTUNED}
    if before:
        del options["xla_gpu_autotune_level"]
    start = seconds()
    with mock.patch.object(programs, "reused", nullcontext) if before else nullcontext():
        low = lower(spec, key)
    middle = seconds()
    if compiles:
        low.compile(compiler_options=options)
    return middle - start, seconds() - middle


def table_of(spec: ExecutionSpec, keys: list[Key], **how: bool) -> dict[str, tuple[int, float, float]]:
    """Number of programs, and seconds of lowering and of compiling, by kind."""
    found: dict[str, tuple[int, float, float]] = {}
    for key in keys:
        lowering, compiling = cost(spec, key, **how)
        print(f"{key!s:24}{lowering:8.2f}{compiling:8.2f}", flush=True)
        count, *sums = found.get(KINDS[type(key)], (0, 0.0, 0.0))
        found[KINDS[type(key)]] = count + 1, sums[0] + lowering, sums[1] + compiling
    return found


def first(quick: bool) -> dict[str, Any]:
    keep_lowered(KEPT)
    spec = described()
    keys = program_keys(spec)[: 3 if quick else None]
    return {"kinds": table_of(spec, keys), "kernels": [lowered.modules.lowered, lowered.modules.taken]}


def second(quick: bool) -> dict[str, Any]:
    """Only lowers: the seconds of all else are the model's."""
    keep_lowered(KEPT)
    spec = described(**SECOND)
    keys = [key for key in spec.table.trunks()][: 1 if quick else None]
    return {
        "kinds": table_of(spec, [*keys], compiles=False),
        "kernels": [lowered.modules.lowered, lowered.modules.taken],
    }


def before(quick: bool) -> dict[str, Any]:
    """The whole table, from a few programs of each kind."""
    spec = described()
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "tile_size": 64}
    spec = dataclasses.replace(spec, table=ProgramTable.build(**sizes))
    counts = Counter(KINDS[type(key)] for key in program_keys(spec))
    found: dict[str, tuple[float, ...]] = {}
    for kind, keys in BEFORE.items():
        [(count, *sums)] = table_of(spec, keys[: 1 if quick else None], before=True).values()
        found[kind] = (counts[kind], *(counts[kind] / count * part for part in sums))
    return {"kinds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--quick", action="store_true", help="a few programs; nothing is saved")
    options = parser.parse_args()
    if "first" in options.parts:
        shutil.rmtree(KEPT, ignore_errors=True)
    for name in options.parts:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(PARTS[name], options.quick).result()
        print(f"\n{name}: kernels lowered and taken: {result.get('kernels')}")
        for kind, (count, lowering, compiling) in result["kinds"].items():
            print(f"{kind:12}{count:4}{lowering:8.1f}{compiling:8.1f}")
        count, lowering, compiling = (
            round(sum(column), 1) for column in zip(*result["kinds"].values(), strict=True)
        )
        print(f"{'all':12}{count:4.0f}{lowering:8.1f}{compiling:8.1f}{lowering + compiling:8.1f}", flush=True)
        if not options.quick:
            add("gpu_compile", None, {name: {**result, "all": (count, lowering, compiling)}})


PARTS = {"first": first, "second": second, "before": before}


if __name__ == "__main__":
    main()
