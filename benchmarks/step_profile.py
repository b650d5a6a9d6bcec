"""The time of a step by operation, compared with the limits of the machine's memory and matrix units.

    python -m benchmarks.step_profile [--model 134m] [--context 256] [--tokens 512] [--seconds 12] [--quick]

Steps of 1, 8 and 32 decode rows, and one of a prompt's tiles, in each number format. An operation's time is
that of its XLA operations in a profiler's trace, without nested ones: the union of their intervals on all
threads, the minimum of several runs. The operation of each instruction is derived from the Python functions
that XLA's text names. Time outside all operations is `gaps`: starting operations, loops, waiting. Since
profiling slows steps with many small operations, the step's total time is measured without it. The floor of
an operation is the larger of its bytes over the measured bandwidth and its operations over the rate of the
best large product in the format, both with all cores. A step's floor is the sum over its operations.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import add, made_model
from benchmarks.reading import reader
from benchmarks.steps import Model, Step, least
from pallas_kernels.llvm.team import threads
from pallas_kernels.products.weight import form_key
from pallas_kernels.products.weights import product, stored
from pallas_kernels.quantization.quantized import quantize

FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
}
RUNS = 12
READ = 1 << 28  # bytes per core, larger than any cache
LARGE = 512, 4096, 4096  # rows, in, out of the product that determines the rate
# The first match counts: functions that must all be in an operation's call chain.
OPERATIONS = {
    "qkv product": ("Attention.__call__", "product"),
    "mlp products": ("GatedMlp.__call__", "product"),
    "rope": ("_rotated",),
    "cache write": ("kv_write",),
    "attention": ("PagedAttention.attend",),
    "norms": ("RMSNorm.__call__",),
    "activation": ("GatedMlp.__call__",),
    "embedding": ("embed",),
    "logits product": ("product",),
}
JOINED = {"qkv product": "o product"}  # if `row_parallel_dense` is in the chain too
Intervals = list[tuple[float, float]]
Event = tuple[str, float, float]  # name, begin and end in nanoseconds


def bandwidth() -> float:
    """Bytes a second read by all cores together."""
    arrays = [jnp.ones(READ // 4, jnp.float32) for _ in range(threads())]
    read = reader(arrays)
    return len(arrays) * READ / min(read() for _ in range(RUNS))


def matrix_rate(name: str) -> float:
    """Multiply-adds a second of the best large product, in its fastest form."""
    rows, size, out = LARGE
    dtype = FORMATS[name]["dtype"]
    x, weight = jnp.ones((rows, size), dtype), jnp.ones((out, size), dtype)
    given = stored(quantize(weight, "int8", inputs=True) if name.endswith("a8") else weight)
    seconds = []
    for form in ("kernel", "float32", "panels", "amx", "xla"):
        args = x, given.with_forms(((form_key(rows, dtype, given.format.name), form),))
        run = partial(jax.jit(product).lower(*args).compile(), *args)
        seconds += [_seconds(run) for _ in range(RUNS)]
    return 2.0 * rows * size * out / min(seconds)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def operations(text: str) -> dict[str, str]:
    """The operation to which each instruction of a compiled program belongs. Loops are left out, since their
    contents count."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.+)$", part, re.M))
        for name, part in re.findall(r"^(\w+)\n((?:\d+ .+\n)+)", text, re.M)
    }

    def number(line: str, field: str) -> str:
        found = re.search(rf"{field}=(\d+)", line)
        return found[1] if found else "0"

    def chain(frame: str) -> list[str]:
        names = []
        while frame in tables["StackFrames"]:
            line = tables["StackFrames"][frame]
            location = tables["FileLocations"][number(line, "file_location_id")]
            names += (
                tables["FunctionNames"][number(location, "function_name_id")].strip('"').split(".<locals>.")
            )
            frame = str(int(number(line, "parent_frame_id")) - 1)
        # however it is computed; what its rows are computed from is not part of it
        return [*names, *["product" for name in names if name.endswith((".by_xla", ".by_cpu_kernel"))][:1]]

    first = {part.split(" ", 1)[0]: number(part, "stack_frame_id") for part in text.split("\n%")}
    out = {}
    for line in text.splitlines():
        instruction = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([a-z\-]+)\(", line)
        if instruction and instruction[2] not in ("while", "call", "conditional", "parameter"):
            called = re.search(r"calls=%([\w.\-]+)", line)
            frame = number(line, "stack_frame_id")  # a fusion may have none, but its contents do
            functions = chain(first.get(called[1], "0") if called and frame == "0" else frame)
            named = next(
                (name for name, needed in OPERATIONS.items() if set(needed) <= set(functions)), "other"
            )
            out[instruction[1]] = JOINED.get(named, named) if "row_parallel_dense" in functions else named
    return out


def traced(step: Step) -> dict[str, float]:
    """Seconds of each operation, and of the gaps between them, from a profile."""
    trunk, sampler = (operations(program.as_text()) for program in step.programs)
    sampler = {name: "sampler" if operation == "other" else operation for name, operation in sampler.items()}
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(RUNS):
                with jax.profiler.TraceAnnotation("run trunk"):
                    to_sample = jax.block_until_ready(step.trunk())
                with jax.profiler.TraceAnnotation("run sampler"):
                    step.sample(to_sample)
        profile = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    threads = [
        [(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
        for plane in profile.planes
        for line in plane.lines
    ]
    events = [event for thread in threads for event in thread]
    best: dict[str, float] = {}
    for program, names in ("trunk", trunk), ("sampler", sampler):
        spans = [
            (names[name], begin, finish)
            for thread in threads
            for name, begin, finish in innermost(e for e in thread if e[0] in names)
        ]
        for _, start, end in (event for event in events if event[0] == f"run {program}"):
            inside: dict[str, Intervals] = defaultdict(list)
            for operation, begin, finish in spans:
                if begin >= start and finish <= end:
                    inside[operation].append((begin, finish))
            times = {name: union(intervals) for name, intervals in inside.items()}
            times[f"gaps ({program})"] = (end - start) / 1e9 - union(
                [interval for intervals in inside.values() for interval in intervals]
            )
            best.update({name: min(seconds, best.get(name, seconds)) for name, seconds in times.items()})
    return best


def innermost(events: Iterable[Event]) -> list[Event]:
    """A thread's events without nested ones: XLA starts an operation's successors before that operation's
    event ends.
    """
    out: list[Event] = []
    open_: list[list[Any]] = []  # name, time since it is the innermost, end

    def close(until: float) -> None:
        while open_ and open_[-1][2] <= until:
            name, since, finish = open_.pop()
            out.append((name, since, finish))
            if open_:
                open_[-1][1] = finish

    for name, begin, finish in sorted(events, key=lambda event: (event[1], -event[2])):
        close(begin)
        if open_:
            out.append((open_[-1][0], open_[-1][1], begin))
        open_.append([name, begin, finish])
    close(float("inf"))
    return out


def union(intervals: Intervals) -> float:
    """Total seconds covered by nanosecond intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e9


def floors(
    model: Model, step: Step, *, rows: int, read: int, sums: int, speed: float, rate: float
) -> dict[str, float]:
    """Minimum seconds: the weights of each product, and attention. Operations that only move activations
    count as zero.

    Args:
        read: tokens whose keys and values attention reads in each layer.
        sums: pairs of a query and a key it sees.
    """
    config, params = model.config, model.params
    layers = [params["layers"][i] for i in range(config.num_layers)]
    out = {}
    for name, weights, tokens in (
        ("qkv product", [layer["attention"]["qkv"] for layer in layers], step.tokens),
        ("o product", [layer["attention"]["o"] for layer in layers], step.tokens),
        (
            "mlp products",
            [layer["mlp"][part] for layer in layers for part in ("gate_up", "down")],
            step.tokens,
        ),
        ("logits product", [params["embed" if config.tie_embeddings else "lm_head"]], rows),
    ):
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        numbers = sum(math.prod(weight.shape) for weight in weights)
        out[name] = max(stored / speed, 2 * tokens * numbers / rate)
    heads, dim, kv = config.num_heads, config.head_dim, config.num_kv_heads
    itemsize = jnp.dtype(model.model.dtype).itemsize
    out["attention"] = config.num_layers * max(
        2 * kv * dim * itemsize * read / speed, 4 * heads * dim * sums / rate
    )
    return out


def report(name: str, seconds: float, times: dict[str, float], floor: dict[str, float]) -> dict[str, Any]:
    print(
        f"\n{name}: {seconds * 1e3:.2f} ms, floor {sum(floor.values()) * 1e3:.2f}, ratio"
        f" {seconds / sum(floor.values()):.2f}"
    )
    for operation, spent in sorted(times.items(), key=lambda item: -item[1]):
        least = floor.get(operation)
        print(
            f"  {operation:16} {spent * 1e3:8.3f}"
            + (f"{least * 1e3:8.3f}{spent / least:7.2f}" if least else "")
        )
    ratio = round(seconds / sum(floor.values()), 2)
    return {"ms": seconds * 1e3, "ratio": ratio, "operations_ms": _ms(times), "floors_ms": _ms(floor)}


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value * 1e3, 4) for name, value in seconds.items()}


def profile(
    folder: Path, name: str, rows: Iterable[int], context: int, tokens: int, budget: float, speed: float
) -> dict[str, Any]:
    model, rate = Model(folder, **FORMATS[name]), matrix_rate(name)
    tile = min(256, tokens)
    steps = {f"{n} rows": model.step(rows=n, context=context) for n in rows}
    steps["prompt"] = model.step(tiles=tokens // tile, tile_size=tile)
    best = least({shape: step.seconds for shape, step in steps.items()}, budget)
    out: dict[str, Any] = {"matrix_gflops": rate / 1e9}
    for shape, step in steps.items():
        n = 0 if shape == "prompt" else int(shape.split()[0])
        pairs = n * (context + 1) if n else tokens * (tokens + 1) // 2
        floor = floors(
            model, step, rows=max(n, 1), read=n * (context + 1) or tokens, sums=pairs, speed=speed, rate=rate
        )
        out[shape] = report(f"{name}, {shape}", best[shape], traced(step), floor)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="134m")
    parser.add_argument(
        "--context", type=int, default=256, help="tokens before the one that decode rows read"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt, a multiple of 256")
    parser.add_argument("--seconds", type=float, default=12, help="for the steps of each format")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--quick", action="store_true", help="bfloat16, 3 seconds, nothing saved")
    options = parser.parse_args()
    speed = bandwidth()
    facts = {"context": options.context, "prompt_tokens": options.tokens, "bandwidth_gbs": speed / 1e9}
    print(f"memory: {speed / 1e9:.1f} GB/s")
    folder = made_model(options.model)
    for name in ["bfloat16"] if options.quick else options.formats:
        budget = 3 if options.quick else options.seconds
        result = profile(folder, name, (1, 8, 32), options.context, options.tokens, budget, speed)
        if not options.quick:
            add("step_profile", None, {name: {**facts, **result}})


if __name__ == "__main__":
    main()
