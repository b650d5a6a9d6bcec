"""jengine and vLLM with the same folders and requests, in turn. Each start is a new process.

Both have their defaults, but no prefix cache and no drafts, at most 256 sequences and 4,096 tokens each. A
first start has no files of earlier ones, a second start has those of the first. Each case has a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.rows import ROOT, Row, failed, skipped
from benchmarks.machine import made_model

SHAPES = "qwen3-0.6b", "8b", "gpt-oss-20b", "qwen3-30b-a3b"  # shapes of tools/make_model.py
START = 900.0  # seconds to the first token, at most
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.9,
        "disable_log_stats": True,
    },
    "jengine": {"num_scheduler_steps": None},  # the default; elsewhere this peer has bursts
}
CACHES = "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


class Case(NamedTuple):
    """Requests, and how they are measured.

    Attributes:
        prompts, outputs: tokens of each request.
        limit: seconds.
        measure: of benchmarks/peers/worker.py.
        temperature: 0: greedy.
        of_prompts: tokens of prompts are counted instead of outputs.
    """

    name: str
    prompts: Sequence[int]
    outputs: Sequence[int]
    limit: float
    measure: str = "batch"
    temperature: float = 0.0
    of_prompts: bool = False


class Load(NamedTuple):
    """The cases of a first start and of a second, and the limits that the engines get."""

    first: Sequence[Case]
    second: Sequence[Case]
    sequences: int
    tokens: int


def full() -> Load:
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(100, 1024, (2, 256), endpoint=True).tolist()
    stream = Case("one stream", [128, 128], [257], 120, "stream")
    second = (
        Case("warm up", [200] * 64, [16] * 64, 300, temperature=0.6),
        stream,
        Case("32 at once", [128] * 32, [256] * 32, 120),
        Case("nano-vllm's 256 requests", prompts, outputs, 300, temperature=0.6),
        Case("32 prompts of 3,000", [3000] * 32, [1] * 32, 120, of_prompts=True),
        Case("1,000 requests of 1,024/1,024", [1024] * 1000, [1024] * 1000, 800, temperature=1.0),
    )
    return Load((stream,), second, 256, 4096)


SMALL = Load(
    (Case("one stream", [8], [4], 300, "stream"),),
    (
        Case("3 at once", [8] * 3, [4] * 3, 300, temperature=0.6),
        Case("2 prompts", [12] * 2, [1] * 2, 300, of_prompts=True),
    ),
    4,
    64,
)


def measure(small: bool) -> Iterator[Row]:
    """Yields a row for each case, of vLLM first; jengine's have the ratio to vLLM's.

    Environment: VLLM_PYTHON, the Python that has vLLM; MODELS, shapes or folders with commas between them.
    """
    vllm = os.environ.get("VLLM_PYTHON")
    if vllm is None:
        yield skipped("vLLM", "VLLM_PYTHON is not set: the Python that has vLLM")
    load, models = SMALL if small else full(), os.environ.get("MODELS")
    for model in models.split(",") if models else ("demo",) if small else SHAPES:
        folder = _folder(model)
        theirs: dict[str, float] = {}
        for engine, python in (("vllm", vllm), ("jengine", sys.executable)):
            for row in [] if python is None else _engine(engine, python, folder, load):
                value, more = next(iter(row.values.values()), None), {}
                if engine == "vllm" and value is not None:
                    theirs[row.case] = value
                elif value is not None and row.case in theirs:
                    more = {"times vLLM's": value / theirs[row.case]}
                yield Row(
                    f"{folder.name}, {engine}, {row.case}", row.values | more, None, row.outcome, row.why
                )


def _folder(model: str) -> Path:
    if model == "demo":
        return ROOT / "jengine" / "demo"
    return Path(model).absolute() if Path(model).is_dir() else made_model(model)


def _engine(engine: str, python: str, folder: Path, load: Load) -> Iterator[Row]:
    """Rows of both starts, without names of the model and engine."""
    with tempfile.TemporaryDirectory() as cache:
        for start, cases in (("first start", load.first), ("second start", load.second)):
            for row in run(engine, python, folder, load, cases, Path(cache), settle=start == "second start"):
                yield Row(f"{start}: {row.case}", row.values, None, row.outcome, row.why)


def run(
    engine: str, python: str, folder: Path, load: Load, cases: Sequence[Case], cache: Path, *, settle: bool
) -> Iterator[Row]:
    """Rows of a process: seconds to the first token, and tokens a second of each case.

    Args:
        cache: for files of the engine.
        settle: wait for all programs before the cases.
    """
    config = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(1)

    def prompt(tokens: int) -> list[int]:
        drawn: list[int] = rng.integers(2, min(10_000, config["vocab_size"]), tokens).tolist()
        return drawn

    def work(case: Case) -> dict[str, Any]:
        many = {"tokens": case.outputs[0]} if case.measure == "stream" else {"outputs": [*case.outputs]}
        how = {"temperature": case.temperature} if case.temperature else {}
        return {
            "measure": case.measure,
            "prompts": [prompt(n) for n in case.prompts],
            **many,
            "sampling": how,
        }

    with tempfile.TemporaryDirectory() as temporary:
        result, log = Path(temporary) / "result.json", Path(temporary) / "log.txt"
        task = {
            "module": engine,
            "precision": "bfloat16",
            "folder": str(folder),
            "cache": str(cache),
            "sequences": load.sequences,
            "tokens": load.tokens,
            "threads": 1,
            "packages": ["jax" if engine == "jengine" else engine],
            "options": ENGINES[engine],
            "first": prompt(4),
            "settle": settle,
            "measures": {case.name: work(case) for case in cases},
            "result": str(result),
        }
        # what the suite sets for its own processes is left out
        kept = {name: each for name, each in os.environ.items() if not name.startswith("XLA_PYTHON_CLIENT_")}
        before = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.worker"],
                cwd=ROOT,
                env={**kept, **dict.fromkeys(CACHES, str(cache)), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # its child processes end with it
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            try:
                yield from _watched(process, result, before, cases, log)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _watched(
    process: subprocess.Popen[str], result: Path, before: float, cases: Sequence[Case], log: Path
) -> Iterator[Row]:
    """Yields each result as it is written, until a case takes longer than its limit or the process ends."""

    def found() -> dict[str, Any]:
        return dict(json.loads(result.read_text())) if result.exists() else {}

    def wait(limit: float, key: str, name: str | None = None) -> Any:
        end = time.monotonic() + limit
        while True:
            ended = process.poll() is not None  # before its last result is read
            now = found()
            for values in (now,) if name is None else (now.get("measured", {}), now.get("failed", {})):
                if (name or key) in values:
                    return values[name or key]
            if ended:
                return f"the process ended with {process.returncode}: {_last(log)}"
            if time.monotonic() > end:
                return f"more than {limit:.0f} s"
            time.sleep(0.05)

    first = wait(START, "first_token")
    if isinstance(first, str):
        yield failed("first token", first)
        return
    versions = wait(START, "versions")
    yield Row(
        "first token", {"s": first - before, "versions": " ".join(map(str, versions.values()))}, outcome="ok"
    )
    for case in cases:
        values = wait(case.limit, "measured", case.name)
        if isinstance(values, str):
            yield failed(case.name, values)
            if case.name not in found().get("failed", {}):
                return
            continue
        rate = values[-1] * (sum(case.prompts) / sum(case.outputs) if case.of_prompts else 1)
        yield Row(case.name, {"tokens/s": rate}, outcome="ok")


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return " ".join(line.strip() for line in lines[-4:] if line.strip())[-400:]
