"""Compares the speeds of `jengine plan` on H200s with what TensorRT-LLM publishes for the same layouts.

    JAX_PLATFORMS=cpu python -m benchmarks.layouts [--quick]

Nothing is measured. TensorRT-LLM's figures are those of its performance overview, at maximum load.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, save
from jengine.capacity.planning.layouts import choose
from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.traffic import Traffic
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import device_spec
from jengine.parallel.layout import Layout

DATA = ROOT / "tests" / "data"
SHAPES = {  # fields of config.json that differ from a model in tests/data
    "Llama 3.3 70B": ("llama-3.1-70b", {}),
    "gpt-oss-120b": ("gpt-oss-120b", {}),
    "Qwen3-235B-A22B": (
        "qwen3-30b-a3b",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        },
    ),
}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
# model, options, layout, tokens of prompts and outputs, published output tokens/s of a device
PUBLISHED: list[tuple[str, dict[str, Any], Layout, tuple[int, int], float]] = [
    ("Llama 3.3 70B", FP8, Layout(tensor=2), (1024, 1024), 2582),
    ("Llama 3.3 70B", FP8, Layout(tensor=2), (8192, 1024), 537),
    ("gpt-oss-120b", {}, Layout(), (1024, 1024), 6798),
    ("gpt-oss-120b", {}, Layout(), (8192, 1024), 1828),
    ("Qwen3-235B-A22B", FP8, Layout(data=4, expert_parallel=True), (1024, 1024), 3268),
]


@functools.cache
def folder_of(name: str) -> Path:
    source, changes = SHAPES[name]
    folder = Path(tempfile.mkdtemp(prefix="layouts"))
    fields = json.loads((DATA / source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))
    return folder


def compared(name: str, options: dict[str, Any], layout: Layout, lengths: tuple[int, int]) -> dict[str, Any]:
    """A layout's planned output tokens a second of a device."""
    config = EngineConfig.of(str(folder_of(name)), {"max_model_len": 16384, **options})
    cluster, traffic = (
        Cluster.of(device_spec("h200"), layout.devices),
        Traffic(prompt=lengths[0], output=lengths[1]),
    )
    [candidate] = choose(config, cluster, traffic, only=layout).candidates
    return {
        "model": name,
        "options": options,
        "layout": str(candidate.deployment),
        "traffic": f"{lengths[0]}/{lengths[1]}",
        "planned": round(candidate.throughput, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first case alone; nothing is saved")
    quick, rows = parser.parse_args().quick, []
    print(f"{'model':16} {'layout':22} {'tokens':>10} {'published':>10} {'planned':>8} {'share':>6}")
    for name, options, layout, lengths, published in PUBLISHED[: 1 if quick else None]:
        row = compared(name, options, layout, lengths)
        row |= {"published": published, "share": round(published / row["planned"], 3)}
        rows.append(row)
        print(
            f"{name:16} {row['layout']:22} {row['traffic']:>10} {published:10,.0f} {row['planned']:8,.0f}"
            f" {row['share']:6.0%}",
            flush=True,
        )
    if not quick:
        save("layouts", {"published": rows})


if __name__ == "__main__":
    main()
