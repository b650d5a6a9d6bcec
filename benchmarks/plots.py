"""The plot in README of `compare`'s results: python -m benchmarks.plots (needs matplotlib, which is in the
extra bench).
"""

from __future__ import annotations

import json

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.machine import RESULTS, ROOT

SOURCE, TARGET = RESULTS / "compare_avx512_bf16.json", ROOT / "docs" / "assets" / "compare.svg"
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
OURS, OTHERS, TEXT = "#3f51b5", "#a9aebd", "#6b7280"  # the last one is readable on light and dark pages


def draw(axes: Axes, title: str, values: list[float]) -> None:
    names = [*ARMS]
    bars = axes.barh(
        range(len(names)),
        values,
        color=[OURS if name.startswith("jengine") else OTHERS for name in names],
        height=0.7,
    )
    axes.bar_label(
        bars,
        [f"{value:,.1f}" if value < 100 else f"{value:,.0f}" for value in values],
        padding=3,
        color=TEXT,
        fontsize=8,
    )
    axes.set_title(title, fontsize=8.5, color=TEXT, loc="left", linespacing=1.3)
    axes.set_xlim(0, 1.25 * max(values))
    axes.set_xticks([])
    axes.tick_params(length=0, labelcolor=TEXT, labelsize=8.5)
    axes.spines[:].set_visible(False)


def main() -> None:
    result = json.loads(SOURCE.read_text())
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")  # two in a row: legible on a phone
    grid = figure.subplots(2, 2, sharey=True)
    for axes, (measured, title) in zip(grid.flat, PANELS.items(), strict=True):
        draw(axes, title, [result["arms"][arm]["measured"][measured]["median"] for arm in ARMS.values()])
        axes.set_yticks(range(len(ARMS)), [*ARMS])
    axes.invert_yaxis()  # all of them, since they share the axis
    matplotlib.rcParams["svg.fonttype"] = "none"  # keeps text as text
    figure.savefig(TARGET, transparent=True, metadata={"Date": None})
    print(f"saved {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
