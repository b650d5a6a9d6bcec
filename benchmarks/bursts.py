"""Benefits of several decode steps in one program, and the additional waiting time of new requests.

    python -m benchmarks.bursts [--models demo 134m] [--rounds 3] [--quick]

One engine with `num_scheduler_steps=8` and one set of programs. Its scheduler uses single steps, bursts, and
"auto" in turn, once in each round. Rows decode 129 tokens each, without stop tokens. Then a request with a
prompt of 64 tokens arrives while 7 others decode, at a random moment of a step or burst; the time to its
first token counts. With "auto", no burst begins while a request waits.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.machine import made_model, save
from benchmarks.restart import restart_scheduler
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.start import start_engine

ROWS, TOKENS = (1, 8, 32), 129
BESIDE, ARRIVALS, PROMPT = 7, 24, 64
WAYS: tuple[int | str, ...] = (1, 8, "auto")


class Bench:
    def __init__(self, model: str) -> None:
        config = EngineConfig.of(
            model,
            {"max_num_seqs": ROWS[-1], "max_model_len": 1024, "num_scheduler_steps": 8, "warm_up": "all"},
        )
        self.engine, _ = start_engine(config)
        self.rng, self.names = np.random.default_rng(0), iter(range(1_000_000))

    def use(self, way: int | str) -> None:
        """Programs for bursts stay compiled; a table without bursts causes single steps."""
        scheduler = self.engine.scheduler
        table, options = (
            replace(scheduler.table, steps=1 if way == 1 else 8),
            replace(scheduler.options, num_scheduler_steps=way),
        )
        restart_scheduler(self.engine, table=table, options=options)

    def add(self, prompt: int, tokens: int) -> str:
        name = str(next(self.names))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        ids = self.rng.integers(2, self.engine.model.vocab_size, prompt).tolist()
        self.engine.add(Request(request_id=name, prompt_token_ids=ids, params=params))
        return name

    def throughput(self, rows: int) -> float:
        """Output tokens a second, after all prompts have been computed."""
        for _ in range(rows):
            self.add(8, TOKENS)
        tokens, start = -rows, 0.0
        while self.engine.has_work:
            tokens += len(self.engine.step())
            if not start and tokens >= 0 and not self.engine.scheduler.registry.num_waiting:
                tokens, start = 0, time.perf_counter()
        return tokens / (time.perf_counter() - start)

    def first_tokens(self) -> list[float]:
        """Milliseconds from an arrival to its first token, while other rows decode."""
        times, moment = [], random.Random(0)
        beside = [self.add(8, 1000) for _ in range(BESIDE)]
        for _ in range(ARRIVALS):
            for _ in range(moment.randrange(4, 12)):
                self.engine.step()
            name, start = self.add(PROMPT, 2), time.perf_counter()
            while not any(
                isinstance(update, TokenUpdate) and update.request_id == name for update in self.engine.step()
            ):
                pass
            times.append(1e3 * (time.perf_counter() - start))
        for name in beside:
            self.engine.end(name, "abort")
        while self.engine.has_work:
            self.engine.step()
        return times


def measured(bench: Bench, rounds: int) -> dict[str, Any]:
    speeds: dict[str, dict[int, list[float]]] = {str(way): {rows: [] for rows in ROWS} for way in WAYS}
    first: dict[str, list[float]] = {str(way): [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            bench.use(way)
            for rows in ROWS:
                speeds[str(way)][rows].append(bench.throughput(rows))
            first[str(way)] += bench.first_tokens()
    return {
        "tokens_per_second": {
            way: {rows: round(statistics.median(found)) for rows, found in by.items()}
            for way, by in speeds.items()
        },
        "ratio": {
            way: {
                rows: round(statistics.median(np.divide(by[rows], speeds["1"][rows]).tolist()), 2)
                for rows in ROWS
            }
            for way, by in speeds.items()
        },
        "first_token_ms": {
            way: {"median": percentile(found, 50), "p90": percentile(found, 90)}
            for way, found in first.items()
        },
    }


def percentile(found: list[float], share: int) -> float:
    return round(float(np.percentile(found, share)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "134m"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the demo model, one round, nothing saved")
    options = parser.parse_args()
    results = {}
    for model in ["demo"] if options.quick else options.models:
        results[model] = measured(
            Bench(model if model == "demo" else str(made_model(model))),
            1 if options.quick else options.rounds,
        )
        print(model, *[f"    {name}: {found}" for name, found in results[model].items()], sep="\n")
    if not options.quick:
        save("bursts", results)


if __name__ == "__main__":
    main()
