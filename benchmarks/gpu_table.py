"""What a GPU's table of programs gives up, and what each of its buckets is worth, in simulated loads.

    python -m benchmarks.gpu_table [--devices h200 ...] [--models 0.6b 8b] [--quick]

Throughput of six loads, relative to a table with every power of two and all samplers (`ProgramTable.build`):
for the table that GPUs have, for it without each of its buckets, and with further ones. Of the last load,
about ten requests at a time, it is the mean of a request. Costs are a roofline's: a trunk takes as long as
reading its weights or as multiplying them, whichever takes longer. Samplers take as long as `jengine plan
--exact` estimates their compiled programs to take (`SAMPLERS`). Needs no GPU and compiles nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.machine import save
from jengine.capacity.simulation.replay import EngineShape, replay
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.core.request import SamplingParams
from jengine.devices.device_spec import DeviceSpec, device_spec
from jengine.scheduling.costs.step_costs import Slopes, StepCosts
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import VARIANTS, ProgramTable, SamplerKey, TableKey, TrunkKey, Variant

ROWS, TOKENS, TILE, LENGTH = 256, 8192, 64, 4096  # the defaults of a GPU, and max_model_len
LAUNCH = 0.25e-3  # seconds of a step that are neither memory nor products
BANDWIDTH, PRODUCTS = (
    0.85,
    0.72,
)  # shares of the data sheet; an H200 reached 0.73 to 0.8 and 0.72 (results/gpu_suite.json)
ATTENTION = 0.5  # share of the products' rate
# Milliseconds beside the product with the vocabulary: of a step, and of a row with 152k tokens, on an H200
# (`jengine plan --exact`)
SAMPLERS: dict[Variant, tuple[float, float]] = {
    "greedy": (0.02, 0.00045),
    "sample": (0.03, 0.00062),
    "truncated": (0.14, 0.0038),
    "full": (0.17, 0.0056),
}
SAMPLED_ON, SAMPLED_TOKENS = "h200", 151936
GOAL = 0.97


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        layers: parameters of all layers.
        rate: requests a second at which about ten run together.
    """

    layers: float
    rate: float
    hidden: int
    vocab: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int = 128


MODELS = {
    "0.6b": Model(0.44e9, 30.0, 1024, 151936, 28, 16, 8),  # Qwen3
    "8b": Model(6.98e9, 8.0, 4096, 128256, 32, 32, 8),  # Llama 3.1
}


def costs_of(table: ProgramTable, model: Model, device: DeviceSpec) -> StepCosts:
    bandwidth, rate = BANDWIDTH * device.bandwidth, PRODUCTS * device.rates["bfloat16"]

    def trunk(key: TrunkKey) -> float:
        tokens = table.tokens(key)
        return max(2 * model.layers / bandwidth, 2 * model.layers * tokens / rate) + LAUNCH

    def sampler(key: SamplerKey) -> float:
        head = model.hidden * model.vocab
        step, row = SAMPLERS[key.variant]
        slower = device_spec(SAMPLED_ON).bandwidth / device.bandwidth * model.vocab / SAMPLED_TOKENS
        return max(2 * head / bandwidth, 2 * head * key.rows / rate) + 1e-3 * (step + slower * row * key.rows)

    known: dict[TableKey, float] = {key: trunk(key) for key in table.trunks()}
    cached = 2 * 2 * model.depth * model.kv_heads * model.head_dim  # bytes of a token
    pair = 4 * model.depth * model.heads * model.head_dim  # operations
    return StepCosts(
        table,
        {**known, **{key: sampler(key) for key in table.samplers()}},
        slopes=Slopes(cached / bandwidth, 0.0, pair / (ATTENTION * device.rates["bfloat16"])),
    )


def loads(rate: float) -> dict[str, tuple[RequestTrace, SamplingParams]]:
    """Each with the parameters of its requests. rate: requests a second, of the last one."""
    rng = np.random.default_rng(0)
    plain, truncated = SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_p=0.9)

    def at_once(prompts: Any, outputs: Any) -> RequestTrace:
        return make_trace([*zip(np.zeros(len(prompts)), prompts, outputs, strict=True)])

    def lognormal(mean: float, deviation: float, count: int, most: int) -> Any:
        return np.clip(rng.lognormal(mean, deviation, count), 4, most).astype(int)

    def poisson(count: int, rate: float, prompts: Any, outputs: Any) -> RequestTrace:
        return make_trace([*zip(np.cumsum(rng.exponential(1 / rate, count)), prompts, outputs, strict=True)])

    uniform = rng.integers(100, 1025, (2, 256))
    return {
        "one stream": (at_once([200], [1000]), plain),
        "32 streams": (at_once([200] * 32, [500] * 32), plain),
        "256 at once": (at_once(*uniform), plain),  # nano-vllm's benchmark
        "prompts of 3,000": (at_once([3000] * 64, [16] * 64), plain),
        "chats, top_p": (
            poisson(800, 400.0, lognormal(5.0, 1.0, 800, 2000), lognormal(5.0, 0.8, 800, 1500)),
            truncated,
        ),
        "few chats": (
            poisson(300, rate, lognormal(5.0, 1.0, 300, 2000), lognormal(5.0, 0.8, 300, 1500)),
            truncated,
        ),
    }


def throughput(
    table: ProgramTable, model: Model, device: DeviceSpec, load: tuple[RequestTrace, SamplingParams]
) -> float:
    """Tokens a second of prompts and outputs; of few requests at a time, of each request's output."""
    trace, params = load
    shape = EngineShape(
        table=table,
        cache=CacheShape(page_size=64, num_pages=1 + ROWS * LENGTH // 64),
        limits=BatchLimits(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_model_len=LENGTH),
        costs=costs_of(table, model, device),
    )
    outcome = replay(shape, trace, params=params)
    if trace.arrivals[-1] > 5.0:  # the device is idle at times
        return float((trace.outputs / (outcome.last - trace.arrivals)).mean())
    return float(trace.prompts.sum() + trace.outputs.sum()) / (outcome.end - outcome.begin)


def variations(table: ProgramTable) -> Iterator[tuple[str, ProgramTable]]:
    """Without each bucket and variant that it can do without, and with more."""
    for name, field in (
        ("rows", "row_buckets"),
        ("rows beside tiles", "mixed_row_buckets"),
        ("tiles", "tile_buckets"),
    ):
        buckets: tuple[int, ...] = getattr(table, field)
        for bucket in buckets[:-1]:
            yield (
                f"without {bucket} {name}",
                replace(table, **{field: tuple(b for b in buckets if b != bucket)}, sample_buckets=()),
            )
    for variant in table.variants[:-1]:
        yield f"without {variant}", replace(table, variants=tuple(v for v in table.variants if v != variant))
    yield (
        "with 64 rows",
        replace(table, row_buckets=tuple(sorted({*table.row_buckets, 64})), sample_buckets=()),
    )
    yield (
        "with 1 and 8 rows",
        replace(table, row_buckets=tuple(sorted({*table.row_buckets, 1, 8})), sample_buckets=()),
    )
    yield (
        "with 64 rows beside tiles",
        replace(table, mixed_row_buckets=tuple(sorted({*table.mixed_row_buckets, 64}))),
    )
    yield (
        "with 1, 2, 8, 32, 64 tiles",
        replace(table, tile_buckets=tuple(sorted({*table.tile_buckets, 1, 2, 8, 32, 64}))),
    )
    for variant in VARIANTS:
        if variant not in table.variants:
            yield (
                f"with {variant}",
                replace(table, variants=tuple(v for v in VARIANTS if v in {*table.variants, variant})),
            )


def measure(model: Model, device: DeviceSpec, *, quick: bool) -> dict[str, dict[str, Any]]:
    whole = ProgramTable.build(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, tile_size=TILE)
    small = ProgramTable.build_for_gpu(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, tile_size=TILE)
    tables = {"every power of two": whole, "a GPU's": small, **({} if quick else dict(variations(small)))}
    every, results = loads(model.rate), {}
    before = {name: throughput(whole, model, device, load) for name, load in every.items()}
    for label, table in tables.items():
        shares = {
            name: round(throughput(table, model, device, load) / before[name], 3)
            for name, load in every.items()
        }
        mean = statistics.mean(shares.values())
        results[label] = {"programs": len(table.all_keys()), "mean": round(mean, 3), **shares}
        print(
            f"{label:28}{len(table.all_keys()):4}{mean:8.3f}  "
            + "".join(f"{share:9.3f}" for share in shares.values()),
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", nargs="+", default=["h200"])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--quick", action="store_true", help="without variations; nothing is saved")
    options = parser.parse_args()
    results = {}
    for device in options.devices:
        for name in options.models:
            print(f"\n{name} on {device}: " + ", ".join(loads(1.0)))
            results[f"{name} on {device}"] = measure(MODELS[name], device_spec(device), quick=options.quick)
    if not options.quick:
        save("gpu_table", {"goal": GOAL, "tables": results})


if __name__ == "__main__":
    main()
