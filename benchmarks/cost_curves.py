"""The cost of a decode step by context length and by number of rows: two plots and their data.

    python -m benchmarks.cost_curves [--model 134m] [--formats bfloat16 float32 w8a8] [--seconds 20] [--quick]

Contexts of 128 to 8k tokens with 1 and 8 rows, and 1 to 64 rows with 256 tokens each: trunk and greedy
sampler, the minimum over interleaved runs. Also shows the time to read memory: weights, and the keys and
values of all rows, at the measured bandwidth.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import RESULTS, made_model, save
from benchmarks.step_profile import FORMATS, bandwidth
from benchmarks.steps import Model, least

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8191)
ROWS = (1, 2, 4, 8, 16, 32, 64)
FIXED_ROWS, FIXED_CONTEXT = (1, 8), 256


def measure(
    folder: Path, name: str, contexts: tuple[int, ...], rows: tuple[int, ...], budget: float, speed: float
) -> list[dict[str, Any]]:
    """A point for each shape: rows, context, milliseconds, and the time to read memory."""
    model = Model(folder, **FORMATS[name])
    few = max(FIXED_ROWS)
    steps = {n: model.step(rows=n, context=max(contexts)) for n in FIXED_ROWS} | {
        n: model.step(rows=n, context=FIXED_CONTEXT) for n in rows if n > few
    }
    shapes = [
        *((n, context) for context in contexts for n in FIXED_ROWS),
        *((n, FIXED_CONTEXT) for n in rows),
    ]

    def run(n: int, context: int) -> float:
        step = steps[n if n in steps else few]
        step.decode(n, context)
        return step.seconds()

    best = least({shape: partial(run, *shape) for shape in shapes}, budget)
    config = model.config
    table = (
        0
        if config.tie_embeddings
        else config.vocab_size * config.hidden_size * jnp.dtype(model.model.dtype).itemsize
    )
    # only a few rows of the embedding are read
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params)) - table
    token = (
        2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(model.model.dtype).itemsize
    )
    return [
        {
            "rows": n,
            "context": context,
            "ms": seconds * 1e3,
            "memory_ms": (weights + n * (context + 1) * token) / speed * 1e3,
        }
        for (n, context), seconds in best.items()
    ]


def plot(
    points: dict[str, list[dict[str, Any]]], file: Path, x: str, fixed: str, values: tuple[int, ...]
) -> None:
    """One curve for each format and each value of the fixed quantity; the memory's part is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for format, color in zip(points, ("tab:blue", "tab:orange", "tab:green"), strict=False):
        for value, marker in zip(values, "os", strict=False):
            curve = sorted((p for p in points[format] if p[fixed] == value), key=lambda p: p[x])
            label = f"{format}, {fixed} {value}"
            axes.plot(
                [p[x] for p in curve], [p["ms"] for p in curve], marker=marker, color=color, label=label
            )
            axes.plot([p[x] for p in curve], [p["memory_ms"] for p in curve], ":", color=color, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"{x}{' (tokens)' if x == 'context' else ''}")
    axes.set_ylabel("decode step (ms); dotted: reading the bytes once")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="134m")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--seconds", type=float, default=20, help="for each format")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="bfloat16, three points a curve; plots into the working folder, nothing saved",
    )
    options = parser.parse_args()
    formats, budget = (["bfloat16"], 5) if options.quick else (options.formats, options.seconds)
    contexts, rows = (CONTEXTS[::3], ROWS[::3]) if options.quick else (CONTEXTS, ROWS)
    speed, folder = bandwidth(), made_model(options.model)
    points = {name: measure(folder, name, contexts, rows, budget, speed) for name in formats}
    for name, curve in points.items():
        for point in curve:
            print(
                f"{name:10} {point['rows']:3} rows, context {point['context']:5}: {point['ms']:8.2f} ms,"
                f" memory {point['memory_ms']:7.2f}"
            )
    where = Path() if options.quick else RESULTS
    plot(points, where / "cost_context.png", "context", "rows", FIXED_ROWS)
    plot(points, where / "cost_rows.png", "rows", "context", (FIXED_CONTEXT,))
    if not options.quick:
        save("cost_curves", {"bandwidth_gbs": speed / 1e9, "points": points})


if __name__ == "__main__":
    main()
