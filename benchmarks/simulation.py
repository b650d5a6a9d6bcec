"""Simulation and engine compared: latencies at three loads, a million requests, and the predictions of
`tune`.

    python -m benchmarks.simulation fidelity  [--repeat 5]
    python -m benchmarks.simulation million
    python -m benchmarks.simulation search    # then
    python -m benchmarks.simulation run

On two cores they take eight minutes, six, half a minute and four, in addition to the compilation of new
programs. Each part adds its figures to results/simulation.json. Engines run in this process, single-threaded.
Arrival times are drawn in advance, and are the same in the simulation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, facts, made_model
from jengine.capacity.simulation.replay import EngineShape, best_options, replay, values
from jengine.capacity.simulation.setup import Setup
from jengine.capacity.simulation.summary import Targets, summarize
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.engine.setup.shapes import describe_engine
from jengine.engine.start import start_engine
from jengine.execution.cache_folders import cache_root, costs_file
from jengine.scheduling.costs.step_costs import Slopes, StepCosts
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable

# Simulated requests say nothing about drafts: they generate one token again and again, of which each draft
# would be right.
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "dtype": "bfloat16",
    "warm_up": "all",
    "speculative_config": "none",
}
LOADS = 0.4, 0.7, 0.9  # shares of the maximum rate
LEARN, MEASURE = 5.0, 25.0  # seconds
GOAL = 0.15
MEASURES = "first_token", "total"
# Prompts and outputs: mean and standard deviation of the logarithm.
TRACES = {"chat": ((4.0, 0.8), (4.4, 0.6)), "code": ((5.7, 0.5), (2.7, 0.6))}
TUNED_SECONDS, OVERLOAD = 14.0, 1.3


def made_trace(
    rng: np.random.Generator,
    rate: float,
    seconds: float,
    prompt: tuple[float, float],
    output: tuple[float, float],
) -> RequestTrace:
    """Poisson arrivals, and log-normal lengths that fit into 1,024 tokens."""
    count = max(int(rate * seconds), 1)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = (np.clip(rng.lognormal(*law, count), 4, 500).astype(int) for law in (prompt, output))
    return make_trace([*zip(arrivals, prompts, outputs, strict=True)])


def drive(engine: Engine, trace: RequestTrace, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from each request's arrival to its first and its last token."""
    count, vocab = len(trace), engine.model.vocab_size
    requests = [
        Request(
            request_id=f"{id(trace)}/{i}",
            prompt_token_ids=rng.integers(2, vocab, trace.prompts[i]).tolist(),
            params=SamplingParams(temperature=0.0, max_tokens=int(trace.outputs[i]), ignore_eos=True),
        )
        for i in range(count)
    ]
    rows = {request.request_id: i for i, request in enumerate(requests)}
    first, last = np.full(count, np.nan), np.full(count, np.nan)
    start, clock, taken = time.perf_counter(), time.monotonic(), 0
    while taken < count or engine.has_work:
        now = time.perf_counter() - start
        while taken < count and trace.arrivals[taken] <= now:
            requests[taken].arrival = clock + trace.arrivals[taken]
            engine.add(requests[taken])
            taken += 1
        if not engine.has_work:
            time.sleep(max(trace.arrivals[taken] - now, 0.0))
            continue
        updates = engine.step()
        now = time.perf_counter() - start
        for update in updates:
            if isinstance(update, TokenUpdate):
                row = rows[update.request_id]
                first[row] = now if np.isnan(first[row]) else first[row]
                last[row] = now
    return first - trace.arrivals, last - trace.arrivals


@contextmanager
def watched(costs: StepCosts, predictions: StepCosts) -> Iterator[dict[str, list[float]]]:
    """In this context, seconds of observed steps and their predictions, for steps with and without
    prompts.
    """
    sums: dict[str, list[float]] = {"decode": [0.0, 1e-9], "prompts": [0.0, 1e-9]}
    inner = costs.observe

    def observe(*step: Any) -> None:
        trunk, sampler, work, seconds, *_ = step
        kind = sums["prompts" if trunk.tiles else "decode"]
        kind[0] += seconds
        kind[1] += predictions.seconds(trunk, sampler, work)
        inner(*step)

    costs.observe = observe  # type: ignore[method-assign]
    yield sums
    costs.observe = inner  # type: ignore[method-assign]


def shape_of(engine: Engine) -> EngineShape:
    """The inputs of a replay, from a running engine."""
    scheduler = engine.scheduler
    return EngineShape(
        table=scheduler.table,
        cache=CacheShape(
            page_size=scheduler.blocks.page_size,
            num_pages=scheduler.blocks.capacity + 1,
            windows=scheduler.blocks.windows,
            prefix_caching=scheduler.blocks.prefix_caching,
        ),
        limits=BatchLimits(
            max_num_seqs=scheduler.registry.max_num_seqs,
            max_num_batched_tokens=scheduler.predictor.max_num_batched_tokens,
            max_model_len=scheduler.limits.max_model_len,
        ),
        costs=scheduler.predictor.costs.under_usual_load(),
        options=scheduler.options,
        overlap=engine.overlap,
    )


def seconds_of(trace: RequestTrace, shape: EngineShape) -> tuple[np.ndarray, np.ndarray]:
    """The replay's prediction of `drive`."""
    outcome = replay(shape, trace)
    return outcome.first - trace.arrivals, outcome.last - trace.arrivals


def capacity(shape: EngineShape, trace: RequestTrace) -> float:
    """Requests a second if all of them wait from the beginning."""
    return len(trace) / replay(shape, trace.scaled(1e9)).end


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    return {f"p{rank}_ms": round(1e3 * float(np.percentile(seconds, rank)), 1) for rank in (50, 95)}


def fidelity(model: str, loads: Sequence[float] = LOADS, repeat: int = 1) -> dict[str, Any]:
    """At each load, predictions and measurements of `repeat` traces, and the median errors."""
    config, spec = describe_engine(EngineConfig.of(model, OPTIONS))
    # perhaps of a busier machine
    costs_file(cache_root(config.cache_dir), spec.fingerprint()).unlink(missing_ok=True)
    engine, _ = start_engine(config, progress=False)
    rng = np.random.default_rng(0)
    some = made_trace(rng, 10.0, 30.0, *TRACES["chat"])
    # The host's costs can only be learned from requests.
    learn = made_trace(rng, 0.5 * capacity(shape_of(engine), some), LEARN, *TRACES["chat"])
    drive(engine, learn, rng)
    results = {}
    for share in loads:
        runs = [compared(engine, share, some, rng) for _ in range(repeat)]
        results[f"{share:.0%}"] = {"goal": GOAL, "median_error": median_error(runs), "runs": runs}
        print(f"{share:.0%} median errors {results[f'{share:.0%}']['median_error']}", flush=True)
    engine.close()
    return results


def compared(engine: Engine, share: float, some: RequestTrace, rng: np.random.Generator) -> dict[str, Any]:
    """One trace at this share of the rate at which the engine could answer `some`."""
    rate = share * capacity(shape_of(engine), some)
    trace = made_trace(rng, rate, MEASURE, *TRACES["chat"])
    shape = shape_of(engine)
    predicted = seconds_of(trace, shape)
    with watched(engine.scheduler.predictor.costs, shape.costs) as steps:
        measured = drive(engine, trace, rng)
    result: dict[str, Any] = {
        "requests": len(trace),
        "requests_per_second": round(rate, 2),
        "steps_measured_to_predicted": {kind: round(got / want, 3) for kind, (got, want) in steps.items()},
    }
    then = seconds_of(trace, shape_of(engine))  # with the costs learned in this run
    for name, *seconds in zip(MEASURES, predicted, then, measured, strict=True):
        want, late, got = map(percentiles, seconds)
        errors, left = ({rank: round(told[rank] / got[rank] - 1, 3) for rank in got} for told in (want, late))
        result[name] = {
            "predicted": want,
            "measured": got,
            "error": errors,
            "error_with_costs_of_the_run": left,
        }
        print(f"{share:.0%} {name:12} predicted {want}  measured {got}  error {errors}", flush=True)
    print(f"{share:.0%} {result['steps_measured_to_predicted']}", flush=True)
    return result


def median_error(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over runs, by measure and percentile, of the errors regardless of their sign."""
    return {
        name: {
            rank: round(statistics.median(abs(run[name]["error"][rank]) for run in runs), 3)
            for rank in runs[0][name]["error"]
        }
        for name in MEASURES
    }


def million(requests: int) -> dict[str, Any]:
    """Lengths as in Azure's conversation trace, costs as for 8 billion parameters on a large GPU, at 70 % of
    its capacity."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(6.6, 0.95, requests), 2, 7000).astype(int)
    outputs = np.clip(rng.lognormal(4.95, 0.95, requests), 2, 1000).astype(int)
    rows, tokens = 256, 8192
    table = ProgramTable.build(max_num_seqs=rows, max_num_batched_tokens=tokens, tile_size=64)
    trunks = {key: 5e-3 + 2e-5 * table.tokens(key) for key in table.trunks()}
    costs = StepCosts(
        table,
        {**trunks, **{key: 1e-6 * key.rows for key in table.samplers()}},
        slopes=Slopes(4e-8, 0.0, 1e-9),
    )
    cache = CacheShape(page_size=64, num_pages=8000, prefix_caching=True)
    limits = BatchLimits(max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=8192)
    shape = EngineShape(table=table, cache=cache, limits=limits, costs=costs)
    some = make_trace([*zip(np.arange(5000.0), prompts[:5000], outputs[:5000], strict=True)])
    rate = 0.7 * capacity(shape, some)
    trace = make_trace([*zip(np.cumsum(rng.exponential(1 / rate, requests)), prompts, outputs, strict=True)])
    begin, cpu = time.perf_counter(), time.process_time()
    outcome = replay(shape, trace, progress=True)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    summary = summarize(outcome, trace, Targets())
    print(
        f"{requests:,} requests in {seconds:.0f} s ({cpu:.0f} s of one core); {outcome.steps:,} steps,"
        f" {outcome.end:.0f} s simulated"
    )
    return {
        "requests": requests,
        "output_tokens": int(trace.outputs.sum()),
        "prompt_tokens": int(trace.prompts.sum()),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "steps": outcome.steps,
        "simulated_seconds": round(outcome.end, 1),
        "summary": asdict(summary),
        "goal_seconds": 600,
    }


def tuned_trace(name: str, setup: Setup) -> RequestTrace:
    """A load that an engine with its initial options cannot serve."""
    rng = np.random.default_rng(7)
    rate = OVERLOAD * capacity(setup.shape(), made_trace(rng, 10.0, 30.0, *TRACES[name]))
    return made_trace(rng, rate, TUNED_SECONDS, *TRACES[name])


def search(name: str, model: str) -> dict[str, Any]:
    """The options found for a trace, and their predicted effect."""
    config = EngineConfig.of(model, OPTIONS)
    engine, _ = start_engine(config, progress=False)  # measures what is missing
    engine.close()
    setup = Setup.of(config)
    trace = tuned_trace(name, setup)
    begin = time.perf_counter()
    tried = values(config, setup.shape(), targets=False)
    tuned = best_options(lambda changes: setup.shape(**changes), tried, trace, Targets(), objective="latency")
    result = {
        "requests": len(trace),
        "requests_per_second": round(len(trace) / trace.seconds, 2),
        "changes": tuned.changes,
        "tried": tuned.tried,
        "search_seconds": round(time.perf_counter() - begin, 1),
        "predicted": {"before": round(tuned.before.mean_total, 3), "after": round(tuned.after.mean_total, 3)},
        "trace": [
            [round(float(at), 6), int(p), int(o)]
            for at, p, o in zip(trace.arrivals, trace.prompts, trace.outputs, strict=True)
        ],
    }
    print({key: value for key, value in result.items() if key != "trace"})
    return result


def run(found: dict[str, Any], which: str, model: str) -> float:
    """The mean seconds of a request, with the options before or after."""
    changes = found["changes"] if which == "after" else {}
    engine, _ = start_engine(EngineConfig.of(model, {**OPTIONS, **changes}), progress=False)
    rng = np.random.default_rng(1)
    trace = make_trace([tuple(row) for row in found["trace"]])
    drive(engine, trace.take(np.arange(min(20, len(trace)))), rng)
    _, total = drive(engine, trace, rng)
    engine.close()
    print(f"{which}: {total.mean():.3f} s")
    return round(float(total.mean()), 3)


def add(section: str, result: dict[str, Any]) -> None:
    """Adds results to results/simulation.json."""
    file = RESULTS / "simulation.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results["machine"] = facts()
    results[section] = {**results.get(section, {}), **result}
    file.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("fidelity", "million", "search", "run"))
    parser.add_argument("--trace", choices=TRACES, help="only this trace, for `search` and `run`")
    parser.add_argument("--load", type=float, action="append", help="only this load, for `fidelity`")
    parser.add_argument("--repeat", type=int, default=5, help="traces for each load of `fidelity`")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--model", help="model to use instead of the 134M shape, which is created if missing")
    options = parser.parse_args()
    model = options.model or (str(made_model("134m")) if options.part != "million" else "")
    names = [options.trace] if options.trace else [*TRACES]
    if options.part == "fidelity":
        add("fidelity", fidelity(model, options.load or LOADS, options.repeat))
    elif options.part == "million":
        add("million", million(options.requests))
    elif options.part == "search":
        add("tune", {name: search(name, model) for name in names})
    else:
        found = json.loads((RESULTS / "simulation.json").read_text())["tune"]
        for name in names:
            found[name]["measured"] = {which: run(found[name], which, model) for which in ("before", "after")}
            add("tune", found)


if __name__ == "__main__":
    main()
