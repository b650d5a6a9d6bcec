"""Decode steps of the 134M shape by format of weights, with 1, 8 and 32 rows, and the time to read the
weights.

    python -m benchmarks.quantized_steps [--rows 1 8 32] [--context 128] [--budget 20] [--quick]

Formats take turns within one process. The floor is the time to read the weights of a one-row step and nothing
else, measured in such turns (benchmarks/reading.py). A step reads all weights except the embedding table,
unless the output head is the same table. Steps are dispatched ahead, as in the engine; "alone" is the time of
a step from its dispatch to its tokens, the host's time to call two programs included. "int4, calibrated" also
transforms the inputs of its products; here its weights are rounded to nearest, which does not affect the
time.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax

from benchmarks.machine import made_model, save
from benchmarks.reading import reader
from benchmarks.steps import Model, least
from jengine.checkpoints import resolve

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "w8a8": {"quantization": "w8a8"},
    "int4": {"quantization": "int4"},
    "w4a8": {"quantization": "w4a8"},
    "int4, calibrated": {"quantization": "int4", "calibrated": True},
    "int4_mixed, calibrated": {"quantization": "int4_mixed", "calibrated": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="tokens that each row reads")
    parser.add_argument(
        "--budget",
        type=float,
        default=14,
        help="seconds for each number of rows, and half of it for each of the others",
    )
    parser.add_argument("--quick", action="store_true", help="the demo model, nothing saved")
    options = parser.parse_args()
    folder = resolve("demo") if options.quick else made_model("134m")
    models = {name: Model(folder, "bfloat16", **form) for name, form in FORMS.items()}
    steps = {
        rows: {name: model.step(rows=rows, context=options.context) for name, model in models.items()}
        for rows in options.rows
    }
    read = {name: weights_read(model) for name, model in models.items()}
    result: dict[str, Any] = {"context": options.context}
    print(
        f"{'':24}{'MiB':>8}{'floor ms':>10}{'GB/s':>7}"
        + "".join(f"{f'{rows} rows, ms (alone)':>28}" for rows in options.rows)
    )
    floor = least({name: reader(arrays) for name, arrays in read.items()}, options.budget / 2)
    best = {
        rows: least({name: step.seconds_ahead for name, step in of.items()}, options.budget)
        for rows, of in steps.items()
    }
    alone = {
        rows: least({name: step.seconds for name, step in of.items()}, options.budget / 2)
        for rows, of in steps.items()
    }
    for name, arrays in read.items():
        size = sum(array.nbytes for array in arrays)
        ms, ms_alone = (
            {str(rows): seconds[rows][name] * 1e3 for rows in options.rows} for seconds in (best, alone)
        )
        result[name] = {"bytes": size, "floor_ms": floor[name] * 1e3, "ms": ms, "alone_ms": ms_alone}
        columns = "".join(
            f"{ms[rows]:8.2f} ({ms_alone[rows]:5.2f}) {result['bfloat16']['ms'][rows] / ms[rows]:9.2f}x "
            for rows in ms
        )
        print(
            f"{name:24}{size / 2**20:8.1f}{floor[name] * 1e3:10.2f}{size / floor[name] / 1e9:7.1f}{columns}"
        )
    if not options.quick:
        save("quantized_steps", result)


def weights_read(model: Model) -> list[jax.Array]:
    """The arrays of which a decode step reads every number."""
    params = dict(model.params)
    if not model.config.tie_embeddings:
        del params["embed"]
    return jax.tree.leaves(params)


if __name__ == "__main__":
    main()
