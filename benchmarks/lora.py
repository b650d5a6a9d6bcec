"""What LoRA adapters cost, and what loading one does to running requests.

    python -m benchmarks.lora [--model 134m] [--places 8] [--rounds 3]

32 streams decode 65 tokens each, without stop tokens, in engines without and with adapters, in turn. An
engine with places for n adapters is measured with none in use, and with 1, 2, 4, 8 or n of rank 16 that
change every dense module (request i uses adapter i modulo the number). Then, while 31 streams decode,
adapters are loaded one after the other in a thread, as `LoadLora` does, and a request uses each: the time to
load one and to its first token, the longest step before and meanwhile, and compilations.

On a busy machine, tokens a second say little; tokens per second of this process's processor time say more.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import numpy as np
from safetensors.numpy import save as to_bytes

from benchmarks.machine import made_model, save
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import LoadLora, UnloadLora
from jengine.engine.start import start_engine
from jengine.execution.runner import Runner

ROWS, TOKENS, PROMPT, RANK, LOADS = 32, 65, 16, 16, 6
USED = 1, 2, 4, 8  # adapters
SIZES = {
    "max_num_seqs": ROWS,
    "max_num_batched_tokens": ROWS + 64,
    "max_model_len": 1024,
    "warm_up": "all",
    "enable_prefix_caching": False,
}


class Bench:
    """An engine with places for so many adapters; 0: without adapters."""

    def __init__(self, model: str, places: int) -> None:
        lora = {"enable_lora": True, "max_loras": places, "max_lora_rank": RANK} if places else {}
        self.engine: Engine = start_engine(EngineConfig.of(model, {**SIZES, **lora}))[0]
        self.rng, self.names, self.places = np.random.default_rng(0), iter(range(1_000_000)), places
        for i in range(places):
            self.engine.do(self.loading(f"adapter {i}"))

    def loading(self, name: str) -> LoadLora:
        """Loads a random adapter of every module."""
        runner = self.engine.runner
        assert isinstance(runner, Runner) and runner.spec.adapters is not None
        tensors = {}
        for module in runner.spec.adapters.modules.values():
            outs, inputs = module.shape
            for side, shape in (("A", (RANK, inputs)), ("B", (outs, RANK))):
                numbers = self.rng.standard_normal(shape, np.float32) / 100
                tensors[f"base_model.model.model.{module.name}.lora_{side}.weight"] = numbers
        return LoadLora(name, config={"r": RANK, "lora_alpha": RANK}, tensors=to_bytes(tensors))

    def add(self, tokens: int, adapter: str | None = None) -> str:
        name = str(next(self.names))
        ids = self.rng.integers(2, self.engine.model.vocab_size, PROMPT).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.engine.add(Request(request_id=name, prompt_token_ids=ids, params=params, lora_name=adapter))
        return name

    def throughput(self, used: int) -> tuple[float, float]:
        """Output tokens a second, after all prompts have been computed, with this number of adapters; and the
        same for seconds of processor time.
        """
        for i in range(ROWS):
            self.add(TOKENS, f"adapter {i % used}" if used else None)
        tokens, start, worked = 0, 0.0, 0.0
        while self.engine.has_work:
            tokens += len(self.engine.step())
            if not start and not self.engine.scheduler.registry.num_waiting:
                tokens, start, worked = 0, time.perf_counter(), time.process_time()
        return tokens / (time.perf_counter() - start), tokens / (time.process_time() - worked)

    def loads(self) -> dict[str, Any]:
        """Loads adapters while streams decode."""
        streams = [self.add(900, "adapter 0") for _ in range(ROWS - 1)]
        before = self.steps(lambda: False, at_least=60)
        compiled, seconds, first, during = self.engine.compiles_since_start, [], [], list[float]()
        for number in range(LOADS):
            operation, done = self.loading(f"new {number}"), threading.Event()

            def load(operation: LoadLora = operation, done: threading.Event = done) -> None:
                begun = time.perf_counter()
                self.engine.do(operation)
                seconds.append(time.perf_counter() - begun)
                done.set()

            threading.Thread(target=load).start()
            during += self.steps(done.is_set)
            begun, name = time.perf_counter(), self.add(2, operation.name)
            during += self.steps(lambda: False, name=name)
            first.append(time.perf_counter() - begun)
            self.engine.do(UnloadLora(operation.name))
        for stream in streams:
            self.engine.end(stream, "abort")
        while self.engine.has_work:
            self.engine.step()
        return {
            "load_ms": milliseconds(seconds),
            "first_token_ms": milliseconds(first),
            "step_ms_before": {**milliseconds(before), "longest": round(1e3 * max(before), 1)},
            "step_ms_meanwhile": {**milliseconds(during), "longest": round(1e3 * max(during), 1)},
            "compilations": self.engine.compiles_since_start - compiled,
        }

    def steps(self, ended: Any, at_least: int = 0, name: str | None = None) -> list[float]:
        """Seconds of steps until a condition holds, or until a request has its first token."""
        found = list[float]()
        while len(found) < at_least or (not at_least and not ended()):
            begun = time.perf_counter()
            updates = self.engine.step()
            found.append(time.perf_counter() - begun)
            if any(isinstance(update, TokenUpdate) and update.request_id == name for update in updates):
                break
        return found


def median(numbers: list[float], digits: int = 1) -> float:
    return round(statistics.median(numbers), digits)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    return {"median": round(1e3 * statistics.median(seconds), 1), "most": round(1e3 * max(seconds), 1)}


def measured(model: str, places: list[int], rounds: int) -> dict[str, Any]:
    benches = [Bench(model, count) for count in (0, *places)]
    ways = [
        (bench, used)
        for bench in benches
        for used in sorted({0, *(count for count in (*USED, bench.places) if count <= bench.places)})
    ]
    for bench, used in ways:
        bench.throughput(used)
    speeds: dict[tuple[int, int], list[tuple[float, float]]] = {
        (bench.places, used): [] for bench, used in ways
    }
    for _ in range(rounds):
        for bench, used in ways:
            speeds[bench.places, used].append(bench.throughput(used))
    base = speeds[0, 0]
    rows = [
        {
            "places": count,
            "adapters": used,
            "tokens_per_second": median([one for one, _ in found]),
            "tokens_per_processor_second": median([one for _, one in found]),
            "ratio": median(np.divide(found, base)[:, 0].tolist(), 3),
            "ratio_by_processor_time": median(np.divide(found, base)[:, 1].tolist(), 3),
        }
        for (count, used), found in speeds.items()
    ]
    return {"throughput": rows, "loading": benches[-1].loads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="134m")
    parser.add_argument("--places", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = options.model if options.model == "demo" else str(made_model(options.model))
    result = measured(model, options.places, options.rounds)
    for row in result["throughput"]:
        print(row)
    print(result["loading"])
    save("lora", {"model": options.model, "rank": RANK, "rows": ROWS, **result})


if __name__ == "__main__":
    main()
