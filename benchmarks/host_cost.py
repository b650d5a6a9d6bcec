"""What a step costs the host: the real loop around programs that do nothing, 256 sequences decoding, one core.

    python -m benchmarks.host_cost [--sequences 256] [--steps 1000] [--quick]

Schedule, pack and collect are the host's own work, and their sum is what the goal is about. Listed apart: the buffer's
transfer with the calls of two empty programs, the wait for the tokens (here none), and text.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks.machine import save
from jengine.checkpoints import read_config, resolve
from jengine.engine import Engine
from jengine.execution.batch import BatchLayout
from jengine.execution.programs import ALLOCATE, Key
from jengine.execution.runner import Runner
from jengine.execution.sampler import Sampled
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.program_table import ProgramTable, TrunkKey
from jengine.request import Request, SamplingParams
from jengine.scheduling.scheduler import Scheduler
from jengine.text.completion import CompletionBuilder
from jengine.text.tokenizer import Tokenizer

GOAL = 1500.0  # microseconds a step
PAGE_SIZE, TILE_SIZE, PROMPT = 16, 64, (16, 512)
PARTS = ("schedule", "pack", "collect")


class NoPrograms:
    """In place of Programs: nothing is computed, and tokens come from a fixed supply."""

    def __init__(self, spec: ExecutionSpec) -> None:
        self._spec = spec
        # Many arrays, since one that was read keeps its copy on the host. Ids from 2 on: 0 and 1 would end a text.
        rng = np.random.default_rng(0)
        vocab, rows = spec.model.config.vocab_size, spec.table.sample_buckets[-1]
        self._supply = [jax.device_put(rng.integers(2, vocab, rows, dtype=np.int32)) for _ in range(64)]
        self._calls = 0

    def __getitem__(self, key: Key) -> Callable[..., Any]:
        if key == ALLOCATE:
            return lambda: ([], self._spec.slots)
        return self._trunk if isinstance(key, TrunkKey) else self._sampler

    def _trunk(self, params: Any, cache: Any, slots: Any, packed: jax.Array) -> tuple[Any, Any, Any, Any]:
        return cache, slots, None, None

    def _sampler(self, params: Any, last_token: Any, sampling: Any, to_sample: Any) -> tuple[Any, Sampled]:
        self._calls += 1
        return last_token, Sampled(self._supply[self._calls % len(self._supply)])


class Clock:
    """Seconds spent in each wrapped method since the last `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: type, method: str, part: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self._spent[part] += time.perf_counter() - start

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, defaultdict(float)
        return spent


def make_engine(sequences: int, tokens: int) -> Engine:
    """An engine of the demo model's shape, without weights, with room for `sequences` of `tokens` each."""
    budget = sequences + 512
    model = replace(read_config(resolve("demo")), max_position=tokens)
    spec = ExecutionSpec(
        model=build(model, "float32", tokens),
        mesh=make_mesh(1),
        table=ProgramTable.build(max_num_seqs=sequences, max_num_batched_tokens=budget, tile_size=TILE_SIZE),
        max_model_len=tokens,
        max_slots=sequences,
        page_size=PAGE_SIZE,
        num_pages=1 + sequences * -(-tokens // PAGE_SIZE),
    )
    scheduler = Scheduler(
        spec.table,
        page_size=PAGE_SIZE,
        num_pages=spec.num_pages,
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        max_model_len=tokens,
    )
    return Engine(model, Runner(Worker(spec, NoPrograms(spec), params=None)), scheduler)  # type: ignore[arg-type]


def measure(sequences: int, steps: int) -> list[dict[str, float]]:
    """Microseconds of each part, for each of `steps` steps in which all sequences decode."""
    rng = np.random.default_rng(0)
    warm_up = 32
    output = 4 * sequences + steps + warm_up  # none ends while others are still prefilled, or while the clock runs
    engine = make_engine(sequences, PROMPT[1] + output)
    tokenizer = Tokenizer.load(resolve("demo"))
    plain, stopping = {}, {}
    for i in range(sequences):
        prompt = rng.integers(2, engine.model.vocab_size, rng.integers(PROMPT[0], PROMPT[1] + 1)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        plain[str(i)] = CompletionBuilder(tokenizer, params)
        stopping[str(i)] = CompletionBuilder(tokenizer, replace(params, stop=("\n\n\n\n", "Question: ")))
    while len(engine.step()) < sequences:
        pass  # until all have been prefilled
    clock = Clock()
    clock.wrap(Scheduler, "schedule", "schedule")
    clock.wrap(BatchLayout, "pack", "pack")
    clock.wrap(Engine, "_collect", "collect")
    clock.wrap(Runner, "dispatch", "dispatch")
    clock.wrap(Runner, "read", "read")
    records = []
    for _ in range(warm_up + steps):
        clock.take()
        start = time.perf_counter()
        updates = engine.step()
        whole = time.perf_counter() - start
        assert len(updates) == sequences
        spent = clock.take()
        for name, builders in (("text", plain), ("text, two stop strings", stopping)):
            start = time.perf_counter()
            for update in updates:
                builders[update.request_id].push(update.token, ends=False)
            spent[name] = time.perf_counter() - start
        spent["loop"] = whole - sum(spent[part] for part in ("schedule", "dispatch", "collect", "read"))
        spent["transfer and calls"] = spent.pop("dispatch") - spent["pack"]
        spent["schedule + pack + collect"] = sum(spent[part] for part in PARTS)
        spent["whole step"] = whole
        records.append({part: 1e6 * seconds for part, seconds in spent.items()})
    return records[warm_up:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="100 steps, nothing saved")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, for JAX's threads too
    records = measure(options.sequences, 100 if options.quick else options.steps)
    parts = {}
    print(
        f"\n{options.sequences} sequences decoding, {len(records)} steps, microseconds a step\n\n{'':28}{'p10':>8}{'median':>8}{'p90':>8}"
    )
    for part in (*PARTS, "schedule + pack + collect", "transfer and calls", "read", "loop", "whole step", "text", "text, two stop strings"):
        low, middle, high = np.percentile([record[part] for record in records], [10, 50, 90]).round(1).tolist()
        parts[part] = {"p10": low, "median": middle, "p90": high}
        print(f"{part:28}{low:8.0f}{middle:8.0f}{high:8.0f}")
    total = parts["schedule + pack + collect"]["median"]
    print(f"\nschedule + pack + collect: {total:.0f} us a step; the goal is {GOAL:.0f}")
    if not options.quick:
        save("host_cost", {"sequences": options.sequences, "steps": len(records), "microseconds": parts, "goal": GOAL})


if __name__ == "__main__":
    main()
