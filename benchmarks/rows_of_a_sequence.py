"""The cost of several decode rows of one sequence, beside those of several sequences, at several contexts.

    python -m benchmarks.rows_of_a_sequence [--model 134m] [--contexts 256 1024 4096 8191] [--seconds 60]
        [--cpu-time] [--quick]

Whole steps (trunk and greedy sampler), and attention of all layers alone, in bfloat16: 1, 2, 4 and 8 rows of
one sequence; 8 rows of one sequence that attention takes one by one; 8 rows of 8 sequences. All take turns;
the minimum counts. On a busy machine, `--cpu-time` measures the CPU time of a single computing thread, which
other processes disturb less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import made_model, save
from benchmarks.steps import PAGE_SIZE, Model, Step, least
from jengine.models.config import ModelConfig
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.options import AttentionOptions

Clock = Callable[[], float]
MOST = 8
EVICTED = 96 << 20  # bytes read before attention is timed, as weights are in a step
WAYS = {"1": 1, "2": 2, "4": 4, "8": MOST, "8 apart": MOST, "8 sequences": MOST}


class Attention:
    """Decode attention of all layers, each with pages of its own."""

    def __init__(self, config: ModelConfig, longest: int, clock: Clock) -> None:
        self._clock = clock
        rng, width = np.random.default_rng(0), -(-longest // PAGE_SIZE)
        shape = 1 + MOST * width, config.num_kv_heads, PAGE_SIZE, config.head_dim
        some = rng.standard_normal(1 << 16, np.float32)
        self._pages = [
            [jnp.asarray(np.resize(some, shape), jnp.bfloat16) for _ in "kv"]
            for _ in range(config.num_layers)
        ]
        self._tables = np.array(1 + rng.permutation(MOST * width).reshape(MOST, width), np.int32)
        self._q = jnp.asarray(rng.standard_normal((MOST, config.num_heads, config.head_dim)), jnp.bfloat16)
        self._evicted = np.ones(EVICTED // 8)
        self._run = jax.jit(partial(_attend, options=AttentionOptions(config.head_dim**-0.5)))

    def seconds(self, way: str, context: int) -> float:
        rows = WAYS[way]
        lengths = context - rows + 2 + np.arange(rows, dtype=np.int32)
        tables = np.repeat(self._tables[:1], rows, 0)
        if way == "8 apart":
            lengths = lengths[::-1]
        elif way == "8 sequences":
            lengths, tables = np.full(rows, context + 1, np.int32), self._tables
        args = jax.device_put((self._q[:rows], tables, lengths))
        self._evicted.sum()
        start = self._clock()
        self._run(*args, self._pages).block_until_ready()
        return self._clock() - start


def _attend(
    q: jax.Array, tables: jax.Array, lengths: jax.Array, pages: Any, options: AttentionOptions
) -> jax.Array:
    for k, v in pages:
        q = dispatch.paged_attention_decode(q, k, v, tables, lengths, options)
    return q


def step_seconds(steps: dict[int, Step], clock: Clock, way: str, context: int) -> float:
    step = steps[1 if way == "1" else MOST]
    if way == "8 sequences":
        step.decode(MOST, context)
    else:
        step.decode_one(WAYS[way], context, apart=way == "8 apart")
    start = clock()
    step.sample(step.trunk())
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="134m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8191])
    parser.add_argument("--seconds", type=float, default=60, help="for steps, and for attention")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of a single computing thread")
    parser.add_argument("--quick", action="store_true", help="two contexts, ten seconds, nothing saved")
    options = parser.parse_args()
    contexts, seconds = ([256, 4096], 10) if options.quick else (options.contexts, options.seconds)
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.cpu_time:
        os.environ["NPROC"] = "1"
    model = Model(made_model(options.model), "bfloat16")
    steps = {n: model.step(rows=n, context=max(contexts)) for n in (1, MOST)}
    attention = Attention(model.config, max(contexts) + 1, clock)
    shapes = [(way, context) for context in contexts for way in WAYS]
    found = {
        "step": least({shape: partial(step_seconds, steps, clock, *shape) for shape in shapes}, seconds),
        "attention": least({shape: partial(attention.seconds, *shape) for shape in shapes}, seconds),
    }
    points = []
    for part, best in found.items():
        print(f"\n{part}, ms (times one row)\n{'context':>8}" + "".join(f"{way:>16}" for way in WAYS))
        for context in contexts:
            row = {way: best[way, context] * 1e3 for way in WAYS}
            print(f"{context:8}" + "".join(f"{f'{ms:.2f} ({ms / row["1"]:.2f})':>16}" for ms in row.values()))
            points.append({"part": part, "context": context, "ms": {k: round(v, 3) for k, v in row.items()}})
    if not options.quick:
        clocked = "CPU time, one thread" if options.cpu_time else "elapsed time"
        save("rows_of_a_sequence", {"model": options.model, "clock": clocked, "points": points})


if __name__ == "__main__":
    main()
