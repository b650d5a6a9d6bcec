"""The cost of batch invariance: the same requests on an engine with it and one without, in turn.

    python -m benchmarks.batch_invariance [--requests 48] [--rounds 2] [--quick]

Greedy requests that arrive together, and a single one. Programs come from the cache if possible; `--starts`
instead measures how long a start without saved programs takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

from benchmarks.batching import RecordingRunner, Work, drain, make_work
from benchmarks.machine import RESULTS, made_model, save
from jengine.core.config import EngineConfig
from jengine.engine.loop.engine import Engine
from jengine.engine.start import start_engine
from jengine.execution.runner import Runner

ARMS = {"default": False, "batch_invariant": True}
LONGEST = 640  # tokens


def config_of(model: str, arm: str, **options: Any) -> EngineConfig:
    return EngineConfig.of(
        model,
        {
            "batch_invariant": ARMS[arm],
            "max_model_len": LONGEST,
            "warm_up": "all",
            "enable_prefix_caching": False,
            **options,
        },
    )


def started(model: str, arm: str, dtype: str) -> tuple[Engine, RecordingRunner]:
    engine, _ = start_engine(config_of(model, arm, dtype=dtype))
    assert isinstance(engine.runner, Runner)
    engine.runner = runner = RecordingRunner(engine.runner, engine.scheduler.table)
    return engine, runner


def seconds(engine: Engine, work: list[Work]) -> float:
    before = time.perf_counter()
    drain(engine, work)
    return time.perf_counter() - before


def throughput(model: str, dtype: str, count: int, rounds: int) -> dict[str, Any]:
    """Output tokens a second of each arm in its fastest round, and of a single request."""
    engines = {arm: started(model, arm, dtype) for arm in ARMS}
    vocab = engines["default"][0].model.vocab_size
    work = [
        Work(item.prompt, min(item.output, 96), min(item.generated, 96)) for item in make_work(count, vocab)
    ]
    alone = [Work(work[0].prompt[:64], 48, 48)]
    took: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    facts: dict[str, Any] = {}
    for engine, _ in engines.values():
        drain(engine, work[:2])  # the first steps of a process are slower
    for _ in range(rounds):
        for arm, (engine, runner) in engines.items():
            runner.record = record = type(runner.record)()
            took[arm].append((seconds(engine, work), seconds(engine, alone)))
            facts[arm] = {
                "programs": len(engine.scheduler.table.trunks()) + len(engine.scheduler.table.samplers()),
                "steps": len(record.rows),
                "padding_share": round(1 - sum(record.real) / sum(record.axis), 3),
                "mean_decode_rows": round(statistics.mean(rows for rows in record.rows if rows), 1),
            }
    tokens = sum(item.output for item in work)
    for arm, runs in took.items():
        facts[arm]["output_tokens_per_second"] = round(tokens / min(run[0] for run in runs), 1)
        facts[arm]["alone_tokens_per_second"] = round(alone[0].output / min(run[1] for run in runs), 1)
    default, invariant = (facts[arm] for arm in ARMS)
    for name in ("output_tokens_per_second", "alone_tokens_per_second"):
        facts[name.replace("_tokens_per_second", "_ratio")] = round(invariant[name] / default[name], 3)
    return facts


def starts(model: str, dtype: str) -> dict[str, float]:
    """Seconds until an engine without saved programs is ready with the whole table."""
    out = {}
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as folder:
            _, facts = start_engine(config_of(model, arm, dtype=dtype, cache_dir=folder))
            out[arm] = round(facts.seconds["programs"] + facts.seconds["warm-up"], 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", default="demo", help="demo, a shape of tools/make_model.py such as 134m, or a folder"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--starts", action="store_true", help="measure starts without saved programs")
    parser.add_argument("--quick", action="store_true", help="8 requests, nothing saved")
    options = parser.parse_args()
    model = str(made_model(options.model)) if options.model == "134m" else options.model
    if options.starts:
        name, facts = f"{options.model}, first start, seconds", starts(model, options.dtype)
    else:
        name = f"{options.model}, {options.dtype}"
        facts = throughput(model, options.dtype, 8 if options.quick else options.requests, options.rounds)
    for arm, figures in facts.items():
        print(f"{arm:18}{figures}")
    if not options.quick:
        save_beside(name, facts)


def save_beside(name: str, facts: dict[str, Any]) -> None:
    """Saves results in addition to those of other models, which are measured one at a time."""
    file = RESULTS / "batch_invariance.json"
    known = json.loads(file.read_text())["models"] if file.exists() else {}
    save("batch_invariance", {"models": {**known, name: facts}})


if __name__ == "__main__":
    main()
