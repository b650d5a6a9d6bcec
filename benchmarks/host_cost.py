"""The host's cost of a step: the real loop with programs that do nothing, 256 decoding sequences, one core.

    python -m benchmarks.host_cost [--sequences 256] [--steps 1000] [--against DIR] [--quick]

The goal applies to the host's work: schedule, pack, collect, and observing the costs of steps. Recording
steps has a separate goal. Listed separately: the buffer's transfer with the calls of two
empty programs, the wait for tokens (none here), and text. Then the scheduler's cost for prompts' pages; see
admission.py. With --against, this file also measures another checkout, in turn, and prints ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.checkpoints import read_config, resolve
from jengine.core.request import Request, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.execution.batch import BatchLayout
from jengine.execution.executor import Worker
from jengine.execution.runner import InFlight, Runner, StepResult
from jengine.execution.sampler import Sampled
from jengine.execution.spec import ExecutionSpec
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from jengine.text.completion import CompletionBuilder, StopAutomaton
from jengine.text.tokenizer import Tokenizer

try:
    from jengine.engine.loop.step_updates import StepClock
except ImportError:  # an older checkout
    StepClock = None  # type: ignore[assignment,misc]
try:
    from jengine.insight.recording.step_recorder import StepRecorder
except ImportError:
    StepRecorder = None  # type: ignore[assignment,misc]

GOAL = 600.0  # microseconds a step
RECORD_GOAL = 20.0  # part of them for the record, and for metrics based on it
GOAL_RATIO = 1.25  # relative to the checkout before query spans and shared pages
BLOCK, ROUNDS = 40, 60  # steps of a block, and blocks per checkout
TOTALLED = 50  # steps between reads of the totals, which happen every second in practice
PAGE_SIZE, TILE_SIZE, PROMPT = 16, 64, (16, 512)
PARTS = ("schedule", "pack", "collect", "observe", "record")
SUM = " + ".join(PARTS)


class NoPrograms:
    """Replaces Programs: computes nothing, and returns tokens from a fixed supply."""

    def __init__(self, spec: ExecutionSpec) -> None:
        self._spec = spec
        # Many arrays, since reading one keeps a copy on the host. Ids start at 2, since 0 and 1 would end a
        # text.
        rng = np.random.default_rng(0)
        vocab, rows = spec.model.config.vocab_size, spec.table.max_rows
        self._supply = [jax.device_put(rng.integers(2, vocab, rows, dtype=np.int32)) for _ in range(64)]
        self._calls = 0

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        if key == "allocate":
            return lambda: ([], self._spec.slots)
        if isinstance(key, TrunkKey):
            return self._trunk
        if isinstance(key, SamplerKey):
            return self._sampler
        return lambda state, *_: state  # slots or pages

    def _trunk(self, params: Any, *args: Any) -> tuple[Any, Any, Any, Any]:
        cache, slots = args[1:3] if len(args) == 6 else args[:2]  # older checkouts give no adapters
        return cache, slots, None, None

    def _sampler(self, params: Any, *args: Any) -> tuple[Any, Sampled]:
        self._calls += 1
        last = args[-3]
        return last, Sampled(self._supply[self._calls % len(self._supply)])


class WaitingRunner(Runner):
    """Reports that each step was waited for, so that its cost is observed."""

    def read(self, step: InFlight) -> StepResult:
        result = super().read(step)
        if hasattr(result, "waited"):  # older checkouts observe every step
            result.waited = True
        return result


class Clock(ExitStack):
    """Seconds spent in each wrapped method since the last `take`. Methods stay wrapped until it exits."""

    def __init__(self) -> None:
        super().__init__()
        self._spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: type, method: str, part: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self._spent[part] += time.perf_counter() - start

        setattr(owner, method, timed)
        self.callback(setattr, owner, method, inner)

    def recorded(self) -> float:
        """Seconds of `record` so far."""
        return self._spent["record"]

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, defaultdict(float)
        return spent


def make_engine(sequences: int, tokens: int, **more: Any) -> Engine:
    """An engine with the demo model's shape, without weights, for `sequences` of `tokens` each; `more`:
    options of its scheduler.
    """
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
        CacheShape(page_size=PAGE_SIZE, num_pages=spec.num_pages, prefix_caching=True),
        BatchLimits(max_num_seqs=sequences, max_num_batched_tokens=budget, max_model_len=tokens),
        **more,
    )
    return Engine(model, WaitingRunner(Worker(spec, NoPrograms(spec), params=None)), scheduler)  # type: ignore[arg-type]


def measure(sequences: int, steps: int) -> list[dict[str, float]]:
    return [*run(sequences, steps)]


def run(sequences: int, steps: int) -> Iterator[dict[str, float]]:
    """Microseconds of each part, for each of `steps` steps in which all sequences decode."""
    rng = np.random.default_rng(0)
    warm_up = 32
    output = 4 * sequences + steps + warm_up  # none ends during the prefill or the measurement
    engine = make_engine(sequences, PROMPT[1] + output)
    tokenizer = Tokenizer.load(resolve("demo"))
    plain, stopping = {}, {}
    stops: tuple[str, ...] = ("\n\n\n\n", "Question: ")
    automaton: Any = getattr(StopAutomaton, "of", StopAutomaton)  # the class in older checkouts
    for i in range(sequences):
        prompt = rng.integers(2, engine.model.vocab_size, rng.integers(PROMPT[0], PROMPT[1] + 1)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        request = Request(request_id=str(i), prompt_token_ids=prompt, params=params)
        engine.add(request)
        plain[str(i)] = CompletionBuilder(tokenizer, request, automaton(()))
        stopping[str(i)] = CompletionBuilder(tokenizer, request, automaton(stops))
    while len(engine.step()) < sequences:
        pass  # until all prompts are computed
    with Clock() as clock:
        clock.wrap(Scheduler, "schedule", "schedule")
        clock.wrap(BatchLayout, "pack", "pack")
        clock.wrap(Engine, "_collect", "collect")
        clock.wrap(Runner, "dispatch", "dispatch")
        clock.wrap(Runner, "read", "read")
        for method in ("planning", "dispatched", "read"):
            if StepClock is not None:
                clock.wrap(StepClock, method, "observe")
        for method in ("turn", "planned", "dispatched", "read", "turned", "passed_on", "totals"):
            if StepRecorder is not None:
                clock.wrap(StepRecorder, method, "record")
        for step in range(warm_up + steps):
            clock.take()
            start = time.perf_counter()
            updates = engine.step()
            whole = time.perf_counter() - start
            assert len(updates) == sequences
            recorded = clock.recorded()
            if StepRecorder is not None:
                engine.passed_on()
                if step % TOTALLED == 0:
                    engine.totals()
            spent = clock.take()
            spent["loop"] = (
                whole
                - sum(spent[part] for part in ("schedule", "dispatch", "collect", "observe", "read"))
                - recorded
            )
            for name, builders in (("text", plain), ("text, two stop strings", stopping)):
                start = time.perf_counter()
                for update in updates:
                    builders[update.request_id].push(update.token, ends=False)
                spent[name] = time.perf_counter() - start
            spent["transfer and calls"] = spent.pop("dispatch") - spent["pack"]
            spent[SUM] = sum(spent[part] for part in PARTS)
            spent["whole step"] = whole
            if step >= warm_up:
                yield {part: 1e6 * seconds for part, seconds in spent.items()}


def compare(other: Path, sequences: int, rounds: int) -> dict[str, Any]:
    """Medians of each part here and in another checkout, in interleaved blocks of steps, and the median ratio
    of blocks.
    """
    folders = {"here": Path(__file__).parent.parent, "there": other.resolve()}
    medians: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in folders}
    command = [
        sys.executable,
        "-P",
        __file__,
        "--sequences",
        str(sequences),
        "--steps",
        str(BLOCK * rounds),
        "--blocks",
    ]
    with ExitStack() as stack:
        running = {}
        for name, folder in folders.items():
            options: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
                "bufsize": 1,
            }
            running[name] = stack.enter_context(
                subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(folder)}, **options)
            )
        for _ in range(rounds):
            for name, process in running.items():
                process.stdin.write("\n")
                for part, value in json.loads(process.stdout.readline()).items():
                    medians[name][part].append(value)
        for process in running.values():
            process.stdin.close()
    ratios = {}
    print(
        f"\nagainst {other}: {rounds} blocks of {BLOCK} steps of each in turn,"
        f" medians\n\n{'':50}{'here':>8}{'there':>8}{'ratio':>8}"
    )
    for part in (*PARTS, SUM):
        here, there = medians["here"][part], medians["there"][part]
        if any(there):
            ratios[part] = round(statistics.median(a / b for a, b in zip(here, there, strict=True)), 3)
        both = f"{statistics.median(here):8.0f}{statistics.median(there):8.0f}"
        print(f"{part:50}{both}{ratios.get(part, math.nan):8.2f}")
    print(f"\nthe goal is at most {GOAL_RATIO}")
    return {
        "ratios": ratios,
        "medians": {
            name: {part: statistics.median(parts[part]) for part in ratios} for name, parts in medians.items()
        },
        "goal": GOAL_RATIO,
    }


def answer(sequences: int, steps: int) -> None:
    """For each input line, runs a block of steps and prints its medians."""
    records = run(sequences, steps)
    for _ in sys.stdin:
        block = [*islice(records, BLOCK)]
        print(
            json.dumps({part: statistics.median(record[part] for record in block) for part in (*PARTS, SUM)}),
            flush=True,
        )


def summary(records: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Percentiles and mean of each part."""
    ranks = {"p10": 10, "median": 50, "p90": 90}
    out = {}
    for part in (
        *PARTS,
        SUM,
        "transfer and calls",
        "read",
        "loop",
        "whole step",
        "text",
        "text, two stop strings",
    ):
        values = [record[part] for record in records]
        out[part] = {name: round(float(np.percentile(values, rank)), 1) for name, rank in ranks.items()}
        out[part]["mean"] = round(statistics.fmean(values), 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--against", type=Path, help="the root of another checkout of this repository")
    parser.add_argument("--blocks", action="store_true", help="what --against runs, see `answer`")
    parser.add_argument("--quick", action="store_true", help="100 steps, nothing saved")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, also for JAX's threads
    steps = 100 if options.quick else options.steps
    if options.blocks:
        answer(options.sequences, steps)
        return
    parts = summary(measure(options.sequences, steps))
    from benchmarks.admission import (
        measure as measure_admission,  # imported here, since other checkouts may lack it
    )
    from benchmarks.machine import save

    head = "".join(f"{name:>8}" for name in parts[SUM])
    print(f"\n{options.sequences} sequences decoding, {steps} steps, microseconds a step\n\n{'':50}{head}")
    for part, values in parts.items():
        print(f"{part:50}" + "".join(f"{value:8.1f}" for value in values.values()))
    print(f"\n{SUM}: {parts[SUM]['median']:.0f} us a step; the goal is {GOAL:.0f}")
    print(
        f"record: {parts['record']['median']:.1f} us a step, {parts['record']['mean']:.1f} on average; the"
        f" goal is {RECORD_GOAL:.0f}"
    )
    admission = measure_admission(rounds=2 if options.quick else 20)
    against = (
        None
        if options.against is None
        else compare(options.against, options.sequences, 5 if options.quick else ROUNDS)
    )
    if not options.quick:
        result = {"sequences": options.sequences, "steps": steps, "microseconds": parts, "goal": GOAL}
        save("host_cost", {**result, "admission": admission, "against": against})


if __name__ == "__main__":
    main()
