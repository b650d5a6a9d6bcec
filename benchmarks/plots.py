"""The plots in README, of `compare`'s results on a CPU and of the GPU suite's: python -m benchmarks.plots
(needs matplotlib, which is in the extra bench).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.machine import RESULTS, ROOT

ASSETS = ROOT / "docs" / "assets"
ARMS = {
    "jengine w8a8": "jengine w8a8",
    "jengine bfloat16": "jengine bfloat16",
    "jengine int4": "jengine int4",
    "vLLM bfloat16": "vllm bfloat16",
    "OpenVINO bfloat16": "openvino bfloat16",
    "OpenVINO int8": "openvino int8+bfloat16",
    "llama.cpp Q4_0": "llama.cpp int4",
}
PANELS = {
    "later start": "seconds from start to first token",
    "stream": "tokens/s, one stream",
    "batch": "tokens/s, 32 at once",
    "prefill": "tokens/s, prompt of 1,024",
}
SUITES = {
    "jengine, H200": ("gpu_suite", "engine"),
    "jengine, H100": ("gpu_suite_h100", "engine"),
    "transformers, H100": ("gpu_suite_h100", "transformers"),
}
GPU_PANELS = {"decode, batch 1": "tokens/s, one stream", "prefill, 1 x 8192": "tokens/s, prompt of 8,192"}
BESIDE_PANELS = {  # cases of the suite's part `beside`, after a second start
    "one stream": "tokens/s, one stream",
    "32 at once": "tokens/s, 32 at once",
    "nano-vllm's 256 requests": "tokens/s, nano-vllm's 256 requests",
    "32 prompts of 3,000": "tokens/s, prompts of 3,000",
}
OURS, OTHERS, TEXT = "#3f51b5", "#a9aebd", "#6b7280"  # the last one is readable on light and dark pages


def draw(axes: Axes, title: str, values: Mapping[str, float]) -> None:
    """Horizontal bars, each with its value."""
    bars = axes.barh(
        range(len(values)),
        [*values.values()],
        color=[OURS if name.startswith("jengine") else OTHERS for name in values],
        height=0.7,
    )
    axes.bar_label(
        bars,
        [f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in values.values()],
        padding=3,
        color=TEXT,
        fontsize=8,
    )
    axes.set_title(title, fontsize=8.5, color=TEXT, loc="left", linespacing=1.3)
    axes.set_xlim(0, 1.25 * max(values.values()))
    axes.set_xticks([])
    axes.set_yticks(range(len(values)), [*values])
    axes.tick_params(length=0, labelcolor=TEXT, labelsize=8.5)
    axes.spines[:].set_visible(False)


def save(name: str, height: float, panels: Mapping[str, Mapping[str, float]]) -> None:
    """Draws panels, two in a row, which is legible on a phone."""
    figure = Figure(figsize=(6.4, height), layout="constrained")
    grid = figure.subplots(len(panels) // 2, 2, sharey=True)
    for axes, (title, values) in zip(grid.flat, panels.items(), strict=True):
        draw(axes, title, values)
    axes.invert_yaxis()  # all of them, since they share the axis
    figure.savefig(ASSETS / name, transparent=True, metadata={"Date": None})
    print(f"saved {(ASSETS / name).relative_to(ROOT)}")


def on_a_cpu() -> dict[str, dict[str, float]]:
    arms = _read("compare_avx512_bf16")["arms"]
    return {
        title: {name: arms[arm]["measured"][measured]["median"] for name, arm in ARMS.items()}
        for measured, title in PANELS.items()
    }


def on_gpus() -> dict[str, dict[str, float]]:
    rows = {name: _read(suite)[part]["rows"] for name, (suite, part) in SUITES.items()}
    return {
        title: {
            name: next(row["tokens/s"] for row in of if row["case"].startswith(case))
            for name, of in rows.items()
        }
        for case, title in GPU_PANELS.items()
    }


def beside_vllm() -> dict[str, dict[str, float]]:
    """Figures of models that both engines ran to the end; empty if there are none."""
    rows = {row["case"]: row.get("tokens/s") for row in _read("gpu_suite").get("beside", {}).get("rows", [])}
    models = dict.fromkeys(case.split(", ")[0] for case in rows if case.count(", ") > 1)

    def rate(model: str, engine: str, case: str) -> float | None:
        return rows.get(f"{model}, {engine}, second start: {case}")

    names = {
        f"{shown}, {model}": (model, engine)
        for model in models
        if all(rate(model, engine, case) for engine in ("jengine", "vllm") for case in BESIDE_PANELS)
        for engine, shown in (("jengine", "jengine"), ("vllm", "vLLM"))
    }
    return {
        title: {name: rate(*names[name], case) or 0.0 for name in names}
        for case, title in BESIDE_PANELS.items()
    }


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def main() -> None:
    matplotlib.rcParams["svg.fonttype"] = "none"  # keeps text as text
    matplotlib.rcParams["svg.hashsalt"] = "jengine"  # the same file again from the same results
    save("compare.svg", 4.0, on_a_cpu())
    save("gpu.svg", 1.3, on_gpus())
    beside = beside_vllm()
    if bars := len(next(iter(beside.values()))):
        save("beside.svg", 1.0 + 0.4 * bars, beside)


if __name__ == "__main__":
    main()
