"""Capacity and cost of the gRPC service, on loopback, with the load generator in a separate process on the
same cores.

    python -m benchmarks.serve_load [--parts open ceiling grpc metrics] [--seconds 20] [--repeat 7] [--quick]

open     Poisson arrivals at shares of the rate of a closed loop of 32 with the demo model: latencies,
throughput and goodput by rate ceiling  a mock engine without cost: tokens/s by the number of streams; and at
maximum speed, the number of messages, and where the server's event loop spends its time
grpc     the demo model, 32 requests at once: AsyncLLM in one process against a server with plain stubs, with
AsyncClient and over HTTP
metrics  a server of the demo model with Prometheus metrics against one without

Compared arms take turns, and the medians of their runs are compared, since other load on the machine varies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.machine import save
from benchmarks.serve_processes import (
    Process,
    load,
    mock_server,
    model_server,
    profile_file,
    top_functions,
    worker,
)
from jengine import CompletionOutput, RequestOutput
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics

MODEL = {"model": "demo", "dtype": "float32", "max_num_seqs": 32, "max_model_len": 512}
PROMPT, OUTPUT = (16, 128), (16, 128)  # tokens, uniform
CONCURRENCY = 32
SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the closed loop's requests a second
# limits for goodput: the first token, and the mean of the others
LIMITS = {"first_token_ms": 250.0, "inter_token_ms": 50.0}
STEP_SECONDS = 0.02
STREAMS = (8, 32, 128, 512)
GOALS = {"grpc": 0.10, "metrics": 0.02}  # maximum share of throughput lost


def make_requests(count: int, rate: float | None = None, seed: int = 0) -> list[Any]:
    """(prompt, max_tokens, time) of requests that arrive as a Poisson process with this rate a second, or
    together.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(*PROMPT, count, endpoint=True), rng.integers(*OUTPUT, count, endpoint=True)
    due = [None] * count if rate is None else np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return [
        [rng.integers(2, 3000, prompt).tolist(), int(output), at]
        for prompt, output, at in zip(*lengths, due, strict=True)
    ]


def same_requests(count: int, tokens: int) -> list[Any]:
    return [[list(range(70, 86)), tokens, None]] * count


def tokens_a_second(told: dict[str, Any]) -> float:
    assert not any(record["error"] for record in told["records"]), "a request was refused"
    return float(sum(sum(record["tokens"]) for record in told["records"]) / told["seconds"])


# --- open loop ------------------------------------------------------------------------------------


def open_loop(seconds: float) -> dict[str, Any]:
    with model_server(MODEL) as (_, address), worker("stub", address) as client:
        load(client, make_requests(CONCURRENCY), CONCURRENCY)  # the first steps of a process are slower
        closed = load(client, make_requests(8 * CONCURRENCY), CONCURRENCY)
        full = len(closed["records"]) / closed["seconds"]
        print(
            f"\nclosed loop of {CONCURRENCY}: {full:.1f} requests/s, {tokens_a_second(closed):.0f} tokens/s"
        )
        print(
            "\n   rate req/s  tokens/s  goodput   first token ms   inter-token ms     end to end s   (p50 p95"
            " p99)"
        )
        rates = []
        for share in SHARES:
            rate = share * full
            rates.append(
                summary(load(client, make_requests(max(20, round(rate * seconds)), rate)), share, rate)
            )
            show(rates[-1])
    facts = {"requests_per_second": round(full, 2), "tokens_per_second": round(tokens_a_second(closed), 1)}
    return {"closed_loop": facts, "limits": LIMITS, "rates": rates}


def summary(told: dict[str, Any], share: float, rate: float) -> dict[str, Any]:
    """Latencies since a request was due, even if it was sent later. If several tokens arrive together, they
    share the time since the previous ones equally."""
    first, inter, whole, good, failed = [], [], [], 0, 0
    for record in told["records"]:
        times, tokens = record["times"], record["tokens"]
        if record["error"] or not times:
            failed += 1
            continue
        first.append(times[0] - record["due"])
        whole.append(times[-1] - record["due"])
        gaps = [
            g
            for gap, count in zip(np.diff(times).tolist(), tokens[1:], strict=True)
            for g in [gap / count] * count
        ]
        inter += gaps
        mean = sum(gaps) / max(len(gaps), 1)
        good += 1e3 * first[-1] <= LIMITS["first_token_ms"] and 1e3 * mean <= LIMITS["inter_token_ms"]
    end = max(record["times"][-1] for record in told["records"] if record["times"])
    return {
        "share_of_closed_loop": share,
        "requests_per_second": round(rate, 2),
        "requests": len(told["records"]),
        "failed": failed,
        "tokens_per_second": round(sum(sum(record["tokens"]) for record in told["records"]) / end, 1),
        "goodput": round(good / len(told["records"]), 3),
        "first_token_ms": percentiles(first, 1e3),
        "inter_token_ms": percentiles(inter, 1e3),
        "end_to_end_seconds": percentiles(whole, 1.0),
    }


def percentiles(values: list[float], scale: float) -> dict[str, float]:
    return {f"p{p}": round(scale * float(np.percentile(values, p)), 2) for p in (50, 95, 99)}


def show(rate: dict[str, Any]) -> None:
    shown = ["".join(f"{value:7.{digits}f}" for value in rate[name].values()) for name, digits in
             (("first_token_ms", 0), ("inter_token_ms", 1), ("end_to_end_seconds", 2))]  # fmt: skip
    print(f"{rate['share_of_closed_loop']:7.2f}{rate['requests_per_second']:6.1f}{rate['tokens_per_second']:10.0f}"
          f"{rate['goodput']:9.1%}" + "".join(shown))  # fmt: skip


# --- the server's own ceiling ---------------------------------------------------------------------


def ceiling(quick: bool) -> dict[str, Any]:
    tokens = 50 if quick else 200
    with mock_server(0.0) as (process, address), worker("stub", address) as client:
        load(client, same_requests(64, 50), 64)
        gathered = busy(process, client, same_requests(256, 10 * tokens), 64)
    print(f"\nas fast as the engine gives them: {told_of(gathered)}")
    steps = []
    with mock_server(STEP_SECONDS) as (process, address), worker("stub", address) as client:
        load(client, same_requests(64, 50), 64)
        for streams in STREAMS:
            steps.append(
                {"streams": streams, **busy(process, client, same_requests(streams, tokens), streams)}
            )
            print(f"{streams:4} streams, a step in {1e3 * STEP_SECONDS:.0f} ms: {told_of(steps[-1])}")
    with profile_file() as file:
        with mock_server(STEP_SECONDS, profile=str(file)) as (_, address), worker("stub", address) as client:
            load(client, same_requests(128, tokens), 128)
        profile = top_functions(file)
    for function in profile:
        print(f"{function['share']:7.1%}{function['calls']:9}  {function['function']}")
    return {"gathered": gathered, "steps": steps, "profile": profile}


def busy(server: Process, client: Process, requests: list[Any], concurrency: int) -> dict[str, Any]:
    """Throughput, and the shares of a core used by the server's process (without the engine's) and by the
    client's.
    """
    before, start = (server.cpu_seconds(), client.cpu_seconds()), time.perf_counter()
    told = load(client, requests, concurrency)
    elapsed = time.perf_counter() - start
    took = server.cpu_seconds() - before[0], client.cpu_seconds() - before[1]
    messages = sum(len(record["times"]) for record in told["records"])
    tokens = sum(sum(record["tokens"]) for record in told["records"])
    return {
        "tokens_per_second": round(tokens_a_second(told), 1),
        "messages_per_token": round(messages / tokens, 3),
        "server_microseconds_per_message": round(1e6 * took[0] / messages, 1),
        "server_cores": round(took[0] / elapsed, 2),
        "client_cores": round(took[1] / elapsed, 2),
    }


def told_of(facts: dict[str, Any]) -> str:
    return (
        f"{facts['tokens_per_second']:.0f} tokens/s, {facts['messages_per_token']:.2f} messages a token, "
        f"{facts['server_microseconds_per_message']:.0f} us of processor each; "
        f"cores: server {facts['server_cores']}, client {facts['client_cores']}"
    )


# --- arms that take turns -------------------------------------------------------------------------


def grpc_cost(repeat: int, quick: bool) -> dict[str, Any]:
    """Throughput, and the CPU time of all processes per token: with all cores busy, one follows from the
    other.
    """
    requests = make_requests((2 if quick else 4) * CONCURRENCY)
    with ExitStack() as stack:
        server, addresses = stack.enter_context(model_server(MODEL, more={"port": 0}))
        address, url = addresses.split()
        places = {"library": json.dumps(MODEL), "stub": address, "client": address, "http": url}
        arms = {kind: stack.enter_context(worker(kind, where)) for kind, where in places.items()}
        cpu: dict[str, list[float]] = {name: [] for name in arms}
        messages: dict[str, float] = {}  # messages per token

        def taken() -> float:
            # processes without a turn use none
            return sum(process.cpu_seconds(children=True) for process in (server, *arms.values()))

        def run(name: str) -> float:
            before = taken()
            told = load(arms[name], requests, CONCURRENCY)
            tokens = sum(sum(record["tokens"]) for record in told["records"])
            cpu[name].append(1e6 * (taken() - before) / tokens)
            messages[name] = round(sum(len(record["times"]) for record in told["records"]) / tokens, 3)
            return tokens_a_second(told)

        result = compared({name: partial(run, name) for name in arms}, repeat, "grpc")
    medians = {name: round(statistics.median(took[1:])) for name, took in cpu.items()}  # without the first
    print("CPU time per token, in us: " + ", ".join(f"{name} {took}" for name, took in medians.items()))
    print("messages per token: " + ", ".join(f"{name} {count}" for name, count in messages.items()))
    return {**result, "cpu_microseconds_per_token": medians, "messages_per_token": messages}


def metrics_cost(repeat: int, quick: bool) -> dict[str, Any]:
    """Throughput, the CPU time of the server's process, and the part of the metrics calls alone, which is the
    most stable figure."""
    requests = make_requests((2 if quick else 4) * CONCURRENCY)
    cpu: dict[str, list[float]] = {"off": [], "on": []}
    with ExitStack() as stack:
        arms = {}
        for name in cpu:
            process, address = stack.enter_context(model_server(MODEL, metrics=name == "on"))
            arms[name] = process, stack.enter_context(worker("stub", address))

        def run(name: str) -> float:
            told = busy(*arms[name], requests, CONCURRENCY)
            cpu[name].append(told["server_microseconds_per_message"])
            return float(told["tokens_per_second"])

        result = compared({name: partial(run, name) for name in arms}, repeat, "metrics")
    medians = {name: statistics.median(took[1:]) for name, took in cpu.items()}  # without the first
    own = calls_alone()
    print(
        f"server's processor time for a message: {medians['off']:.0f} us without, {medians['on']:.0f} with;"
        f" the calls alone: {own:.1f} us, {own / medians['off']:.1%}"
    )
    return {**result, "server_microseconds_per_message": medians, "calls_alone_microseconds": round(own, 2)}


def calls_alone() -> float:
    """Microseconds of the metrics calls for a message with one token."""
    model = ModelMetrics("demo", lambda: None, lambda: 0)  # type: ignore[arg-type,return-value]
    watch = Metrics(model).request_started()
    output = RequestOutput(
        request_id="", prompt=None, prompt_token_ids=[1], outputs=[CompletionOutput(token_ids=[1])]
    )
    return min(timeit.repeat(lambda: watch.tokens(output), number=10_000, repeat=5)) * 100


def compared(arms: dict[str, Callable[[], float]], repeat: int, goal: str) -> dict[str, Any]:
    """Tokens/s of each arm, and its loss relative to the first."""
    for run in arms.values():
        run()  # the first run of a process is slower
    runs: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeat):
        for name, run in arms.items():
            runs[name].append(round(run(), 1))
    first = next(iter(runs))
    lost = {}
    for name, rates in runs.items():
        ratios = [rate / base for rate, base in zip(rates, runs[first], strict=True)]
        lost[name] = round(1 - statistics.median(ratios), 3)
        print(
            f"{name:10}{statistics.median(rates):9.0f} tokens/s, {lost[name]:6.1%} lost (runs:"
            f" {min(rates):.0f} to {max(rates):.0f})"
        )
    print(f"the goal is at most {GOALS[goal]:.0%}")
    return {"tokens_per_second": runs, "lost": lost, "goal": GOALS[goal]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ("open", "ceiling", "grpc", "metrics")
    parser.add_argument(
        "--parts", nargs="+", choices=parts, default=parts, help="fewer than all are saved under their names"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, at each rate")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each arm")
    parser.add_argument("--quick", action="store_true", help="a few seconds of each, nothing saved")
    options = parser.parse_args()
    quick, repeat = options.quick, 2 if options.quick else options.repeat
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "open": lambda: open_loop(3.0 if quick else options.seconds),
        "ceiling": lambda: ceiling(quick),
        "grpc": lambda: grpc_cost(repeat, quick),
        "metrics": lambda: metrics_cost(repeat, quick),
    }
    results = {part: run[part]() for part in options.parts}
    if not quick:
        name = "_".join(("serve_load", *(results if len(results) < len(run) else ())))
        save(name, {"model": MODEL, "concurrency": CONCURRENCY, **results})


if __name__ == "__main__":
    main()
