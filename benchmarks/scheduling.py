"""Batching modes, strategies and targets: the real scheduler on a virtual clock, and the engine itself.

    python -m benchmarks.scheduling [--real [batching] [latency] [memory]] [--host] [--costs FILE] [--quick]

On the virtual clock, steps take the time that the cost model of the 134M shape on this machine predicts, so
that thousands of requests and a sweep of fixed settings take seconds. FILE has saved costs. `--real` runs
parts on the engine, with fewer requests; `--host` measures the host's cost of strategies.

batching  output tokens/s of a backlog, and latency at 70 % of continuous batching's rate; compared with
          the minimum time of any schedule for the same work at these costs
latency   share of requests within targets at three Poisson rates, compared with fixed settings: tiles a
          step, and sequences at once
memory    preemptions and tokens/s with pages for a third of the sequences that could run
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linprog

from benchmarks.host_cost import Clock, make_engine
from benchmarks.machine import RESULTS, made_model, save
from benchmarks.restart import restart_scheduler
from jengine.capacity.simulation.fast_forward import StepTimes
from jengine.capacity.simulation.replay import EngineShape
from jengine.capacity.simulation.trace import make_trace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.scheduling_options import SchedulingOptions
from jengine.engine.loop.engine import Engine
from jengine.engine.start import start_engine
from jengine.execution.batch import BatchLayout
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.promises.acceptance import in_time
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.scheduling.step_plan import Work, pairs

PROMPT, OUTPUT = (16, 512), (16, 256)  # tokens, uniform
SEQS, TILE, PAGE, TILES = 32, 64, 16, 8
BUDGET, MODEL_LEN = SEQS + TILES * TILE, PROMPT[1] + OUTPUT[1]
FULL_POOL = 1 + SEQS * MODEL_LEN // PAGE
TPOT = {"tight": 1.2, "loose": 1.5}  # targets, as multiples of a full step of rows
LOADS = (0.5, 0.8, 1.1)  # share of the rate that continuous batching can serve
GOAL = 0.95  # of the bound
ARMS: dict[str, dict[str, Any]] = {
    "throughput": {},
    "latency, serve": {"strategy": "latency"},
    "latency, reject": {"strategy": "latency", "on_late": "reject"},
    "auto": {"strategy": "auto"},
}


class Arrival(NamedTuple):
    """One request of a workload."""

    arrival: float  # seconds
    prompt: list[int]
    output: int  # tokens after which it ends


class Outcome(NamedTuple):
    """The outcome of a workload."""

    seconds: float
    tokens: int
    latencies: list[float]  # of answered requests, from arrival to end
    in_target: float  # share of all requests, if they have targets
    preemptions: int
    rejected: int
    decisions: dict[str, int]
    steps: int


def workload(count: int, rate: float | None = None, seed: int = 0) -> list[Arrival]:
    """Requests that arrive together, or as a Poisson process with this rate a second."""
    rng = np.random.default_rng(seed)
    gaps = np.zeros(count) if rate is None else rng.exponential(1.0 / rate, count)
    lengths = rng.integers(*PROMPT, count, endpoint=True), rng.integers(*OUTPUT, count, endpoint=True)
    return [
        Arrival(float(at), rng.integers(2, 3000, prompt).tolist(), int(output))
        for at, prompt, output in zip(np.cumsum(gaps), *lengths, strict=True)
    ]


# --- the virtual clock --------------------------------------------------------------------------------


def replay(
    costs: StepCosts,
    work: list[Arrival],
    *,
    seqs: int = SEQS,
    tiles: int = TILES,
    num_pages: int = FULL_POOL,
    known: bool = True,
    **options: Any,
) -> Outcome:
    """Runs a workload on the virtual clock. known: max_tokens are the actual lengths, not the same for
    all.
    """
    shape = EngineShape(
        table=costs.table,
        cache=CacheShape(page_size=PAGE, num_pages=num_pages),
        limits=BatchLimits(
            max_num_seqs=seqs, max_num_batched_tokens=SEQS + tiles * TILE, max_model_len=MODEL_LEN
        ),
        costs=costs,
        options=SchedulingOptions(**options),
    )
    limits = None if known else np.full(len(work), OUTPUT[1])
    trace = make_trace([(asked.arrival, len(asked.prompt), asked.output) for asked in work], limits=limits)
    scheduler = shape.scheduler()
    got = VirtualEngine(scheduler, StepTimes(costs), trace, np.arange(len(trace))).run()
    times = zip(trace.arrivals.tolist(), got.last.tolist(), trace.outputs.tolist(), strict=True)
    done = [(arrival, end, tokens) for arrival, end, tokens in times if end == end]  # not nan
    return outcome(scheduler, got.steps, 0.0, done, scheduler.acceptance.goodput.met / len(work))


def outcome(
    scheduler: Scheduler, steps: int, begin: float, done: list[tuple[float, float, int]], in_target: float
) -> Outcome:
    """done: (arrival, end, generated tokens) of each answered request."""
    return Outcome(
        seconds=max(end for _, end, _ in done) - begin,
        tokens=sum(tokens for *_, tokens in done),
        latencies=sorted(end - arrival for arrival, end, _ in done),
        in_target=in_target,
        preemptions=scheduler.registry.num_preemptions,
        rejected=scheduler.acceptance.goodput.rejected,
        decisions=dict(scheduler.admission.decisions),
        steps=steps,
    )


def least_seconds(costs: StepCosts, work: list[Arrival]) -> float:
    """The minimum time in which steps of this table can compute these prompts and outputs, in any order.

    A linear program over programs: as many tiles and rows as the work needs, at their costs. Attention is
    added: it does not depend on the order.
    """
    table = costs.table
    tiles = sum(-(-len(asked.prompt) // TILE) for asked in work)
    rows = sum(asked.output - 1 for asked in work)
    trunks = [trunk for trunk in table.trunks() if trunk.tiles <= TILES]
    needs = np.array([[trunk.tiles for trunk in trunks], [trunk.rows for trunk in trunks]])
    found = linprog([costs.seconds(trunk) for trunk in trunks], A_ub=-needs, b_ub=[-tiles, -rows])
    attended = sum(pairs(0, len(asked.prompt)) for asked in work)
    context = sum(pairs(len(asked.prompt), asked.output - 1) for asked in work)
    attention = costs.seconds(trunks[0], work=Work(context=context, attended=attended)) - costs.seconds(
        trunks[0]
    )
    return float(found.fun) + attention


def batching(costs: StepCosts, count: int) -> dict[str, Any]:
    backlog = workload(count)
    bound = sum(asked.output for asked in backlog) / least_seconds(costs, backlog)
    results: dict[str, Any] = {"bound_tokens_per_second": round(bound, 1)}
    rate = None
    for mode in ("continuous", "dynamic", "static"):
        full = replay(costs, backlog, batching=mode)
        per_second = full.tokens / full.seconds
        rate = rate or 0.7 * count / full.seconds
        part = replay(costs, workload(count, rate), batching=mode)
        results[mode] = {
            "tokens_per_second": round(per_second, 1),
            "of_bound": round(per_second / bound, 3),
            "steps": full.steps,
            "requests_per_second_at_70_percent": round(rate, 3),
            **percentiles(part),
        }
    return results


def latency(costs: StepCosts, count: int) -> dict[str, Any]:
    capacity = count / replay(costs, workload(count)).seconds
    results: dict[str, Any] = {"capacity_requests_per_second": round(capacity, 3)}
    for name, slower in TPOT.items():
        targets = targets_of(costs, slower)
        results[name] = {
            "targets": targets,
            **{f"load {load}": _at_load(costs, count, load * capacity, load, targets) for load in LOADS},
        }
    return results


def _at_load(
    costs: StepCosts, count: int, rate: float, load: float, targets: dict[str, float]
) -> dict[str, Any]:
    work = workload(count, rate, seed=1)
    fixed = {
        f"{tiles} tiles, {seqs} sequences": round(
            replay(costs, work, seqs=seqs, tiles=tiles, **targets).in_target, 4
        )
        for tiles in (1, 2, 4, 8)
        for seqs in (8, 16, 24, 32)
    }
    best = max(fixed, key=lambda name: fixed[name])
    got = {name: replay(costs, work, **targets, **options) for name, options in ARMS.items()}
    return {
        "best_fixed": {"setting": best, "in_target": fixed[best]},
        **{
            name: {"in_target": round(one.in_target, 4), "rejected": one.rejected, **percentiles(one)}
            for name, one in got.items()
        },
        "decisions": got["latency, serve"].decisions,
        "fixed": fixed,
    }


def targets_of(costs: StepCosts, slower: float) -> dict[str, float]:
    """Each token within `slower` times the duration of a full step of rows; the first within three times the
    longest prompt's duration."""
    rows = costs.seconds(costs.table.trunk(SEQS, 0), work=Work(SEQS * MODEL_LEN // 2, MODEL_LEN))
    prompt = costs.seconds(costs.table.trunk(SEQS, TILES), work=Work(attended=pairs(0, PROMPT[1])))
    return {"ttft_ms": round(3e3 * prompt, 1), "tpot_ms": round(1e3 * slower * rows, 1)}


def memory(costs: StepCosts, count: int) -> dict[str, Any]:
    """Requests with the maximum max_tokens, most of which end earlier."""
    pool, work, results = 1 + FULL_POOL // 3, workload(count), {}
    for known in (True, False):
        for strategy in ("throughput", "memory", "auto"):
            got = replay(costs, work, num_pages=pool, strategy=strategy, known=known)
            results[f"{strategy}, max_tokens {'exact' if known else 'the same for all'}"] = {
                "preemptions": got.preemptions,
                "tokens_per_second": round(got.tokens / got.seconds, 1),
                **percentiles(got),
            }
    return {"pages": pool - 1, **results}


def percentiles(got: Outcome) -> dict[str, float]:
    if len(got.latencies) < 2:
        return {}
    cuts = statistics.quantiles(got.latencies, n=20, method="inclusive")
    return {"p50_seconds": round(cuts[9], 2), "p95_seconds": round(cuts[18], 2)}


# --- the engine itself --------------------------------------------------------------------------------


def run_engine(engine: Engine, work: list[Arrival], **options: Any) -> Outcome:
    """Runs the same on the engine, by the wall clock."""
    scheduler = engine.scheduler
    restart_scheduler(
        engine,
        num_pages=options.pop("num_pages", scheduler.blocks.capacity + 1),
        max_num_seqs=options.pop("seqs", SEQS),
        max_num_batched_tokens=SEQS + options.pop("tiles", TILES) * TILE,
        max_model_len=MODEL_LEN,
        prefix_caching=False,
        options=SchedulingOptions(**options),
    )
    sequences, ended, begin, steps = [], {}, time.monotonic(), 0
    coming = []
    for i, asked in enumerate(work):
        params = SamplingParams(temperature=0.0, max_tokens=asked.output, ignore_eos=True)
        coming.append(
            Request(
                request_id=str(i), prompt_token_ids=asked.prompt, params=params, arrival=begin + asked.arrival
            )
        )
    coming.reverse()
    while coming or engine.has_work:
        while coming and coming[-1].arrival <= time.monotonic():
            sequences += engine.add(coming.pop())
        if not engine.has_work:
            time.sleep(max(coming[-1].arrival - time.monotonic(), 0.0))
            continue
        engine.step()
        steps += 1
        now = time.monotonic()
        for sequence in sequences:
            if sequence.finish_reason is not None:
                ended.setdefault(sequence, now)
    answered = [sequence for sequence in sequences if sequence.finish_reason != "abort"]
    done = [(one.arrival, ended[one], len(one.tokens) - one.prompt_len) for one in answered]
    met = sum(in_time(one, ended[one]) for one in answered)
    return outcome(scheduler, steps, min(one.arrival for one in sequences), done, met / len(sequences))


@contextmanager
def started(quick: bool) -> Iterator[Engine]:
    options = {
        "max_num_seqs": SEQS,
        "max_model_len": MODEL_LEN,
        "max_num_batched_tokens": BUDGET,
        "tile_size": TILE,
        "page_size": PAGE,
    }
    model = "demo" if quick else str(made_model("134m"))
    engine, _ = start_engine(
        EngineConfig.of(model, {**options, "warm_up": "all", "enable_prefix_caching": False})
    )
    try:
        yield engine
    finally:
        engine.close()


def real_batching(engine: Engine, count: int) -> dict[str, Any]:
    work = workload(count)
    bound = sum(asked.output for asked in work) / least_seconds(engine.scheduler.predictor.costs, work)
    results: dict[str, Any] = {"requests": count, "bound_tokens_per_second": round(bound, 1)}
    for mode in ("continuous", "dynamic", "static"):
        got = run_engine(engine, work, batching=mode)
        predicted = replay(engine.scheduler.predictor.costs, work, batching=mode)
        results[mode] = {
            "tokens_per_second": round(got.tokens / got.seconds, 1),
            "predicted": round(predicted.tokens / predicted.seconds, 1),
            "of_bound": round(got.tokens / got.seconds / bound, 3),
            **percentiles(got),
        }
    return results


def real_latency(engine: Engine, count: int) -> dict[str, Any]:
    costs = engine.scheduler.predictor.costs
    targets = targets_of(costs, TPOT["tight"])
    capacity = 200 / replay(costs, workload(200)).seconds
    work = workload(count, LOADS[1] * capacity, seed=1)
    results: dict[str, Any] = {"requests": count, "load": LOADS[1], "targets": targets}
    for name in ("throughput", "latency, serve", "latency, reject"):
        predicted, got = (
            replay(costs, work, **targets, **ARMS[name]),
            run_engine(engine, work, **targets, **ARMS[name]),
        )
        shares = {
            "in_target": round(got.in_target, 3),
            "predicted": round(predicted.in_target, 3),
            "rejected": got.rejected,
        }
        results[name] = {**shares, **percentiles(got)}
    return results


def real_memory(engine: Engine, count: int) -> dict[str, Any]:
    work, pool, results = workload(count), 1 + FULL_POOL // 3, {}
    for strategy in ("throughput", "memory"):
        got = run_engine(engine, work, num_pages=pool, strategy=strategy)
        results[strategy] = {
            "preemptions": got.preemptions,
            "tokens_per_second": round(got.tokens / got.seconds, 1),
            **percentiles(got),
        }
    return {"requests": count, "pages": pool - 1, **results}


def host(sequences: int = 256, rounds: int = 12, block: int = 40) -> dict[str, Any]:
    """Microseconds of schedule, pack and collect with each strategy, if all sequences have targets:
    interleaved blocks of steps.
    """
    targets = {"ttft_ms": 1e6, "tpot_ms": 1e6}
    options = {
        "throughput": {},
        **{name: {"strategy": name, **targets} for name in ("latency", "memory", "auto")},
    }
    length = 4 * sequences + block * rounds + 100
    engines = {
        name: make_engine(sequences, 64 + length, options=SchedulingOptions(**some))
        for name, some in options.items()
    }
    took: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        for i in range(sequences):
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            engine.add(
                Request(
                    request_id=str(i),
                    prompt_token_ids=[2 + i, *range(2, 40)],
                    params=params,
                    arrival=time.monotonic(),
                )
            )
        while len(engine.step()) < sequences:
            pass
    with Clock() as clock:
        for owner, method in ((Scheduler, "schedule"), (BatchLayout, "pack"), (Engine, "_collect")):
            clock.wrap(owner, method, "host")
        for _ in range(rounds):
            for name, engine in engines.items():
                clock.take()
                spent = []
                for _ in range(block):
                    engine.step()
                    spent.append(1e6 * clock.take()["host"])
                took[name].append(statistics.median(spent))
    medians = {name: statistics.median(blocks) for name, blocks in took.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(took[name], took["throughput"], strict=True))
        for name in took
    }
    rounded = {name: {"microseconds": round(medians[name]), "ratio": round(ratios[name], 3)} for name in took}
    return {"sequences": sequences, "goal": 1.3, **rounded}


VIRTUAL: dict[str, Callable[[StepCosts, int], dict[str, Any]]] = {
    "batching": batching,
    "latency": latency,
    "memory": memory,
}
REAL: dict[str, tuple[Callable[[Engine, int], dict[str, Any]], int]] = {
    "batching": (real_batching, 64),
    "latency": (real_latency, 64),
    "memory": (real_memory, 48),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--real", nargs="*", choices=REAL, help="these parts on the engine; by default all")
    parser.add_argument("--host", action="store_true", help="measure the host's cost of strategies")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--costs", type=Path, help="saved costs to use instead of this machine's")
    parser.add_argument("--quick", action="store_true", help="the demo model, few requests, nothing saved")
    options = parser.parse_args()
    if options.host:
        note({"host": host(rounds=2 if options.quick else 12)}, options.quick)
    if options.real is not None:
        with started(options.quick) as engine:
            run_engine(engine, workload(4))  # the first steps of a process are slower
            for name in options.real or REAL:
                part, count = REAL[name]
                note(
                    {f"real_{name}": part(engine, options.requests or (8 if options.quick else count))},
                    options.quick,
                )
    elif not options.host:
        if options.costs is None:
            with started(options.quick) as engine:
                costs = engine.scheduler.predictor.costs
        else:
            costs = StepCosts.from_json(options.costs.read_bytes())
        for name, run in VIRTUAL.items():
            note({name: run(costs, options.requests or (40 if options.quick else 600))}, options.quick)


def note(result: dict[str, Any], quick: bool) -> None:
    """Prints a part's result, and saves it with those of other parts."""
    json.dump(result, sys.stdout, indent=1)
    if not quick:
        file = RESULTS / "scheduling.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        before.pop("machine", None)
        save("scheduling", {"goal_of_bound": GOAL, **before, **result})


if __name__ == "__main__":
    main()
