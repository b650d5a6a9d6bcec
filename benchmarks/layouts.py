"""Chooses layouts for large models on H200s, compares the bounds with what others publish, with estimates of
compiled programs, and with simulations.

    JAX_PLATFORMS=cpu python -m benchmarks.layouts [--quick]

Nothing is measured: all figures of jengine are bounds of `jengine plan --devices`, so a published figure must
be below, and so must be the speed that `benchmarks.estimates` predicts for a compiled program.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.estimates import LLAMA_70B, QWEN3_30B_A3B
from benchmarks.machine import RESULTS, ROOT, save
from jengine.capacity.layouts.choice import Choice, choose
from jengine.capacity.layouts.links import Cluster
from jengine.capacity.layouts.replays import replayed
from jengine.capacity.layouts.report import plain, report
from jengine.capacity.layouts.serving import Traffic
from jengine.capacity.layouts.step import Batch
from jengine.capacity.simulation.summary import Targets
from jengine.capacity.simulation.trace import make_trace
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout
from tools.make_model import COMMON, SHAPES

DATA = ROOT / "tests" / "data"
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
MODELS: dict[str, dict[str, Any] | Path] = {  # config.json, or a folder that has it
    "Llama 3.3 70B": {**COMMON, **SHAPES["8b"], **LLAMA_70B},
    "DeepSeek V3": DATA / "deepseek-v3",
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-235B-A22B": QWEN3_235B_A22B,
    "gpt-oss-120b": DATA / "gpt-oss-120b",
}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
# model, H200s, options, milliseconds per token at most
CHOICES: list[tuple[str, int, dict[str, Any], float]] = [
    ("Llama 3.3 70B", 8, {}, 50.0),
    ("Llama 3.3 70B", 8, FP8, 50.0),
    ("DeepSeek V3", 16, {}, 50.0),
    ("Qwen3-30B-A3B", 2, {}, 50.0),
]
# TensorRT-LLM's performance overview: output tokens/s of one H200 at maximum load
PUBLISHED: list[tuple[str, dict[str, Any], Layout, tuple[int, int], float]] = [
    ("Llama 3.3 70B", FP8, Layout(tensor=2), (1024, 1024), 2582),
    ("Llama 3.3 70B", FP8, Layout(tensor=2), (8192, 1024), 537),
    ("gpt-oss-120b", {}, Layout(), (1024, 1024), 6798),
    ("gpt-oss-120b", {}, Layout(), (8192, 1024), 1828),
    ("Qwen3-235B-A22B", FP8, Layout(data=4, expert_parallel=True), (1024, 1024), 3268),
]
# model, H200s, requests, milliseconds per token at most, layouts
SIMULATED: list[tuple[str, int, int, float, tuple[str, ...]]] = [
    (
        "Llama 3.3 70B",
        8,
        2000,
        50.0,
        (
            "tensor 2, 4 replicas",
            "tensor 4, 2 replicas",
            "tensor 8",
            "2 stages x tensor 2, 2 replicas",
            "2 stages x tensor 4",
            "4 stages x tensor 2",
        ),
    ),
    ("Qwen3-30B-A3B", 2, 8000, 20.0, ("data 2, experts whole", "tensor 2", "one device, 2 replicas")),
]
# of benchmarks/results/estimates.json, each with the layout that its programs were compiled for
COMPILED = {
    "70b": ("Llama 3.3 70B", Layout(tensor=8)),
    "30b-a3b": ("Qwen3-30B-A3B", Layout()),
    "30b-a3b-on-2": ("Qwen3-30B-A3B", Layout(tensor=2)),
}


def chosen(
    name: str, devices: int, options: dict[str, Any], traffic: Traffic, only: Layout | None = None
) -> Choice:
    config = EngineConfig.of(str(_folder(name)), {"max_model_len": 16384, **options})
    return choose(config, name, Cluster.of(device_spec("h200"), devices), traffic, only=only)


@functools.cache
def _folder(name: str) -> Path:
    known = MODELS[name]
    if isinstance(known, Path):
        return known
    folder = Path(tempfile.mkdtemp(prefix="layouts"))
    (folder / "config.json").write_text(json.dumps(known))
    return folder


def choices(cases: list[tuple[str, int, dict[str, Any], float]]) -> list[dict[str, Any]]:
    found = []
    for name, devices, options, tpot in cases:
        choice = chosen(name, devices, options, Traffic(prompt=1024, output=1024, tpot_ms=tpot))
        print(f"{report(choice)}\n", flush=True)
        found.append({"options": options, **plain(choice)})
    return found


def published() -> list[dict[str, Any]]:
    """Bounds beside what TensorRT-LLM reaches."""
    print(f"{'TensorRT-LLM':16} {'layout':22} {'tokens':>10} {'published':>10} {'bound':>8} {'share':>6}")
    found = []
    for name, options, layout, (prompt, output), figure in PUBLISHED:
        choice = chosen(name, layout.devices, options, Traffic(prompt=prompt, output=output), layout)
        [candidate] = choice.candidates
        bound = candidate.throughput
        lengths, shown = f"{prompt}/{output}", str(candidate.deployment)
        print(f"{name:16} {shown:22} {lengths:>10} {figure:10,.0f} {bound:8,.0f} {figure / bound:6.0%}")
        found.append(
            {
                "model": name,
                "options": options,
                "layout": shown,
                "traffic": lengths,
                "published": figure,
                "bound": round(bound, 1),
                "share": round(figure / bound, 3),
            }
        )
    return found


def simulated() -> list[dict[str, Any]]:
    """Plans beside simulations: requests of lengths around the plan's, all there from the beginning."""
    print(f"\n{'simulated':15} {'layout':32} {'plan':>7} {'simulated':>10} {'plan ms':>8} {'simulated':>10}")
    found, random = [], np.random.default_rng(0)
    for name, devices, count, tpot, layouts in SIMULATED:
        choice = chosen(name, devices, {}, Traffic(prompt=1024, output=512, tpot_ms=tpot))
        config = EngineConfig.of(str(_folder(name)), {"max_model_len": 16384})
        lengths = random.uniform(0.5, 1.5, (count, 2)) * [1024, 512]
        trace = make_trace([(0.0, int(prompt), int(output)) for prompt, output in lengths])
        for candidate in choice.candidates:
            shown, point = str(candidate.deployment), candidate.best
            if shown not in layouts or point is None:
                continue
            done = replayed(config, candidate, trace, Targets())
            per_token = 1e3 * done.summary.per_token[50]
            speeds = f"{point.per_device:7,.0f} {done.per_device:10,.0f}"
            print(f"{name:15} {shown:32} {speeds} {1e3 * point.tpot:8.1f} {per_token:10.1f}", flush=True)
            found.append(
                {
                    "model": name,
                    "layout": shown,
                    "plan_per_device": round(point.per_device, 1),
                    "per_device": round(done.per_device, 1),
                    "plan_ms": round(1e3 * point.tpot, 2),
                    "ms": round(per_token, 2),
                }
            )
    return found


def compiled() -> list[dict[str, Any]]:
    """Bounds of decode steps beside estimates from programs that were compiled for H200s."""
    estimates = json.loads((RESULTS / "estimates.json").read_text())["models"]
    print(f"\n{'programs':12} {'rows x context':>15} {'estimate ms':>12} {'bound ms':>9} {'share':>6}")
    found = []
    for key, (name, layout) in COMPILED.items():
        traffic = Traffic(prompt=1024, output=1024)
        choice = chosen(name, layout.devices, {"max_model_len": 32768}, traffic, layout)
        [candidate] = choice.candidates
        for case, figures in estimates[key]["steps"].items():
            rows, _, context = case.partition(" x ")
            if not rows.isdecimal() or not context.isdecimal():
                continue
            bound = 1e3 * candidate.serving.costs.seconds(Batch(int(rows), float(context)))
            print(f"{key:12} {case:>15} {figures['ms']:12.2f} {bound:9.2f} {bound / figures['ms']:6.0%}")
            found.append(
                {"model": key, "step": case, "estimate_ms": figures["ms"], "bound_ms": round(bound, 3)}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest choice alone; nothing is saved")
    if parser.parse_args().quick:
        choices(CHOICES[-1:])
        return
    result = {"choices": choices(CHOICES), "published": published(), "compiled": compiled()} | {
        "simulated": simulated()
    }
    save("layouts", result)


if __name__ == "__main__":
    main()
