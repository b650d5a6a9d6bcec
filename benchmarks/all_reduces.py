"""The sums of a step over several GPUs, compiled for GPUs that are not there: their HLO, launches and PTX.

    python -m benchmarks.all_reduces [--target h100] [--devices 2 4 8]

Needs the extra `aot`. The steps are those of Llama 3.1 8B with one of its layers. Each is compiled as an
engine compiles it, and with XLA's own kernels for sums turned off. A row has the sums in the HLO with the
strategy that XLA chose, a step's launches, and what the PTX of XLA's kernels does. NCCL's kernels are in its
library: of these, there is the launch alone. Then follow a plan's estimates of the whole model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.gpu.several import NCCL
from benchmarks.machine import ROOT, save
from jengine.capacity.planning.plan import make_plan
from jengine.capacity.planning.report import tables
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.execution.programs import UNTUNED, gpu_options, lower
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import TrunkKey
from pallas_kernels.compilation import ahead_of_time
from tests.execution.thunks import dumped, dumping, leaves

MODEL, LAYERS = ROOT / "tests" / "data" / "llama-3.1-8b", 1
STEPS = {  # trunks with one-shot sums, with two-shot sums, and with sums that only NCCL takes
    "16 rows": TrunkKey(16, 0),
    "256 rows": TrunkKey(256, 0),
    "16 rows and 8192 tokens of prompts": TrunkKey(16, 128),
}
KINDS = {"XLA's choice": {}, "NCCL alone": NCCL}
SUM = re.compile(r"= \(*(\w+\[[\d,]*\]).* all-reduce(?:-start)?\(")
SENT = "st.release.sys"  # by a kernel that tells other devices
INSTRUCTIONS = {  # of PTX, by what they are for
    "signals": SENT,
    "waits": "ld.acquire.sys",
    "barriers of a block": "bar.sync",
    "multimem": "multimem.",
    "additions": "add.rn.bf16x2|add.bf16x2|add.rn.bf16|add.bf16|add.f32|add.rn.f32|fma.rn.bf16x2|fma.rn.bf16",
}


def options_of(devices: int, **more: Any) -> EngineConfig:
    how = {"tensor_parallel_size": devices, "max_model_len": 4096, "max_num_seqs": 256}
    return EngineConfig.of(str(MODEL), {**how, **more})


def steps(target: str, devices: int) -> Iterator[dict[str, Any]]:
    """Rows of all steps and kinds."""
    config = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    mesh = make_mesh(devices, ahead_of_time.devices(target, devices))
    spec = describe(options_of(devices), model_config(config), mesh, Path())
    for step, key in STEPS.items():
        for kind, options in KINDS.items():
            with TemporaryDirectory() as folder:
                written = dumping(Path(folder)) | {"xla_dump_emitter_re": "ptx"}
                compiled = lower(spec, key).compile(
                    compiler_options={**gpu_options(spec), **UNTUNED, **options, **written}
                )
                [thunks] = dumped(Path(folder)).values()
                kernels = [text for file in Path(folder).glob("*.ptx") if SENT in (text := file.read_text())]
            yield {
                "devices": devices,
                "step": step,
                "kind": kind,
                "hlo": Counter(sums(compiled.as_text() or "")),
                "command buffers": len(thunks),
                "launches": Counter(one.kind for one in leaves(thunks) if re.search("Reduce|Coll", one.kind)),
                "kernels": Counter(map(counted, kernels)),
            }


def sums(text: str) -> Iterator[str]:
    """The shape and the strategy of each all-reduce in HLO."""
    for line in text.splitlines():
        if found := SUM.search(line):
            strategy = re.search(r"KERNEL_STRATEGY_(\w+)", line)
            yield f"{found[1]} {strategy[1].lower() if strategy else ''}".rstrip()


def counted(ptx: str) -> str:
    """What a kernel of XLA does."""
    found = re.search(r"\.reqntid (\d+)", ptx)
    numbers = (f"{len(re.findall(pattern, ptx))} {name}" for name, pattern in INSTRUCTIONS.items())
    return ", ".join([f"{found[1] if found else '?'} threads", *numbers])


def planned(target: str, devices: int) -> list[dict[str, Any]]:
    """Milliseconds of a decode step of the whole model, by number of rows."""
    every = tables(make_plan(options_of(devices), target))
    [exchanges] = [table for table in every if "exchanges" in table.head]
    names = "exchanges", "with NCCL alone", "step"
    return [
        {"devices": devices, "rows": int(rows.replace(",", ""))}
        | {name: float(cell.split()[0]) for name, cell in zip(names, cells, strict=True)}
        for rows, *cells in exchanges.rows
    ]


def measured(target: str, devices: int) -> list[dict[str, Any]]:
    rows = []
    for row in steps(target, devices):
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="h100", help="the GPU")
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], help="how many of them")
    args = parser.parse_args()
    compiled, plans = list[dict[str, Any]](), list[dict[str, Any]]()
    for devices in args.devices:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            compiled += pool.submit(measured, args.target, devices).result()
        plans += planned(args.target, devices)
    for plan in plans:
        print(json.dumps(plan))
    save("all_reduces", {"target": args.target, "steps": compiled, "plans": plans})


if __name__ == "__main__":
    main()
