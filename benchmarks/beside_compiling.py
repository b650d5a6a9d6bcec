"""What a served model loses while programs for a GPU are compiled beside it.

    python -m benchmarks.beside_compiling [--workers 8] [--seconds 60] [--arms alone children threads]

The demo is served on the CPU, with all of its programs, to 32 streams. Meanwhile programs of a Qwen3-0.6B for
an H200 are lowered, compiled and serialized by `--workers` processes or threads. A further thread sleeps a
millisecond again and again: what it takes in excess, a step may have to wait for Python's lock, too. This
needs the extra `aot`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported

from benchmarks.machine import save
from jengine import LLM, SamplingParams
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.execution.compile_children import CompileChildren, Job, Target
from jengine.execution.program_store import packed
from jengine.execution.programs import UNTUNED, compile_all, program_keys
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
TARGET = Target("h200", 1, 128 << 30)
STREAMS, TOKENS, PROMPT = 32, 64, "def fibonacci(n):"
GOALS = 0.85, 10.0, 50.0  # of the tokens/s alone; milliseconds of the 99th percentile, and at most
WARM = 10.0  # seconds until an arm's workers are at work, which do not count


class Sleeper:
    """Sleeps for a millisecond, again and again."""

    def __init__(self) -> None:
        self.waits, self._ended = list[float](), False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended:
            before = time.perf_counter()
            time.sleep(0.001)
            self.waits.append(time.perf_counter() - before - 0.001)

    def end(self) -> dict[str, float]:
        """Milliseconds."""
        self._ended = True
        waits = sorted(self.waits)
        at = {"median": 0.5, "p99": 0.99, "longest": 1.0}
        return {
            name: round(1e3 * waits[min(int(part * len(waits)), len(waits) - 1)], 2)
            for name, part in at.items()
        }


def served(llm: LLM, seconds: float) -> dict[str, Any]:
    """Tokens/s of a time, and the sleeper's waits in it."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [f"{PROMPT} {n}" for n in range(STREAMS)]
    sleeper, begun, rates = Sleeper(), time.perf_counter(), list[float]()
    while (now := time.perf_counter()) < begun + seconds:
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(STREAMS * TOKENS / (time.perf_counter() - now))
    mean = len(rates) * STREAMS * TOKENS / (time.perf_counter() - begun)
    return {"tokens/s": round(mean, 1), "worst call": round(min(rates), 1), **sleeper.end()}


def by_children(spec: ExecutionSpec, workers: int, done: list[float]) -> Any:
    """Begins to compile with other processes. Returns what ends them."""
    children, job = CompileChildren(workers, TARGET), Job.of(spec, TARGET)
    for result in [children.compile(job, "update") for _ in range(workers)]:
        result.result()  # all have started
    for key in program_keys(spec):
        children.compile(job, key).add_done_callback(
            lambda result: None if result.exception() else done.append(result.result().seconds)
        )
    children.step_aside()
    return children.close


def by_threads(spec: ExecutionSpec, workers: int, done: list[float]) -> Any:
    """Compile with threads of this process, which cannot be ended."""

    def run() -> None:
        for built in compile_all(
            spec, program_keys(spec), threads=workers, progress=False, options=UNTUNED, background=True
        ):
            packed(built.program, "gpu")
            done.append(built.seconds)

    threading.Thread(target=run, daemon=True).start()
    return lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    arms: dict[str, Any] = {"alone": lambda *_: lambda: None, "children": by_children, "threads": by_threads}
    parser.add_argument("--arms", nargs="+", choices=arms, default=[*arms])
    parser.add_argument("--layers", type=int, default=QWEN3_06B["num_hidden_layers"])
    options = parser.parse_args()
    config = model_config({**QWEN3_06B, "num_hidden_layers": options.layers})
    spec = describe(
        EngineConfig.of("MODEL", {"max_model_len": 4096, "max_num_seqs": 256}),
        config,
        make_mesh(1, TARGET.devices()),
        Path(),
    )
    spec = dataclasses.replace(spec, num_pages=16384)
    llm = LLM("demo", progress=False)
    assert llm.wait_until_compiled()
    gc.collect()
    gc.freeze()  # as a server's engine process
    served(llm, 5.0)
    results = dict[str, Any]()
    for arm in options.arms:
        done = list[float]()
        end = arms[arm](spec, options.workers, done)
        if arm != "alone":
            time.sleep(WARM)
        results[arm] = {**served(llm, options.seconds), "programs": len(done)}
        end()
        print(arm, results[arm], flush=True)
    print(f"\n{'':10}" + "".join(f"{name:>12}" for name in results[options.arms[0]]))
    for arm, row in results.items():
        print(f"{arm:10}" + "".join(f"{value:>12}" for value in row.values()))
    print(
        f"goals: {GOALS[0]:g} of the tokens/s alone, waits of {GOALS[1]:g} ms at p99 and {GOALS[2]:g} at most"
    )
    save("beside_compiling", {"workers": options.workers, "arms": results})
    sys.stdout.flush()
    os._exit(0)  # threads may still compile


if __name__ == "__main__":
    main()
