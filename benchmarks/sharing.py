"""Benefits of shared pages: a common prefix of many requests, samples of one prompt, a chat, and windows.

    python -m benchmarks.sharing [--parts arrivals samples chat windows reserved] [--rounds 3] [--quick]

arrivals  64 requests arrive together: a common prefix of 1,024 tokens, suffixes of 64, and 32 tokens of
          output each
samples   n=8 for a prompt of 512 tokens, and eight requests with that prompt: number of computed prompt
          tokens
chat      10 turns, each with the whole conversation before it: time to the first token of the tenth
windows   bytes of cache for a sequence of 8,192 tokens, for models with windows; no model runs
reserved  slots in sequences' pages without a token; no model runs

The first three use the 134M shape, random weights, one engine and one set of programs, with the prefix cache
on and off in turn, and empty at the start of each. A round's ratio compares two consecutive runs; the median
over rounds counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, made_model, save
from benchmarks.page_use import bytes_at_8k, unused_slots
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.start import start_engine
from jengine.execution.runner import InFlight, Runner
from jengine.scheduling.step_plan import StepPlan

PAGE_SIZE = 16
REQUESTS, PREFIX, SUFFIX, OUTPUT = 64, 1024, 64, 32
SAMPLES, SAMPLED_PROMPT = 8, 512
TURNS, SYSTEM, QUESTION, ANSWER = 10, 256, 64, 64
GOALS = {"first_token": 5.0, "tokens_per_second": 2.0, "prompt_tokens": SAMPLED_PROMPT}


class CountingRunner(Runner):
    """Counts the prompt tokens that steps compute."""

    prompt_tokens = 0

    def dispatch(self, plan: StepPlan) -> InFlight:
        prompts = plan.spans[len(plan.spans) - plan.prompts :]
        self.prompt_tokens += sum(span.length for span in prompts)
        return super().dispatch(plan)


@dataclass(slots=True)
class Ran:
    """Seconds from the arrival of all requests to each one's first token, and to the last token; number of
    computed prompt tokens."""

    first: list[float]
    whole: float
    computed: int
    tokens: dict[str, list[int]]


class Bench:
    def __init__(self, model: str, max_num_seqs: int, max_model_len: int, num_pages: int) -> None:
        options = {
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "num_pages": num_pages,
            "page_size": PAGE_SIZE,
        }
        self.engine, started = start_engine(EngineConfig.of(model, options))
        self.dtype = started.dtype
        runner = self.engine.runner
        assert isinstance(runner, Runner)
        self.runner = self.engine.runner = CountingRunner(runner.worker)
        self.rng = np.random.default_rng(0)

    def prompt(self, tokens: int) -> list[int]:
        ids: list[int] = self.rng.integers(2, self.engine.model.vocab_size, tokens).tolist()
        return ids

    def cache(self, on: bool) -> None:
        """Switches the prefix cache on or off, and empties it."""
        self.engine.do(ResetPrefixCache())
        self.engine.scheduler.blocks.prefix_caching = on

    def run(self, prompts: list[list[int]], output: int, samples: int = 1) -> Ran:
        """Runs `samples` completions of each prompt, all of which arrive together."""
        engine, first, before = self.engine, dict[str, float](), self.runner.prompt_tokens
        tokens: dict[str, list[int]] = {}
        params = SamplingParams(temperature=float(samples > 1), max_tokens=output, ignore_eos=True, seed=1)
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add(
                *(
                    Request(request_id=f"{i}.{j}", prompt_token_ids=prompt, params=params, sample_index=j)
                    for j in range(samples)
                )
            )
        while engine.has_work:
            for update in engine.step():
                assert isinstance(update, TokenUpdate)
                first.setdefault(update.request_id, time.perf_counter() - start)
                tokens.setdefault(update.request_id, []).append(update.token)
        return Ran([*first.values()], time.perf_counter() - start, self.runner.prompt_tokens - before, tokens)


def in_turn(rounds: int, run: Callable[[bool], Any]) -> dict[bool, list[Any]]:
    """Runs `run(on)` in each round: off, then on."""
    results: dict[bool, list[Any]] = {False: [], True: []}
    for _ in range(rounds):
        for on in results:
            results[on].append(run(on))
    return results


def arrivals(bench: Bench, requests: int, shared: int, rounds: int) -> dict[str, Any]:
    def run(on: bool) -> dict[str, float]:
        prefix = bench.prompt(shared)
        prompts = [prefix + bench.prompt(SUFFIX) for _ in range(requests)]
        bench.cache(on)
        ran = bench.run(prompts, OUTPUT)
        median, p90 = np.percentile(ran.first, [50, 90]).tolist()
        return {
            "first_token_median_s": round(median, 3),
            "first_token_p90_s": round(p90, 3),
            "tokens_per_second": round(requests * OUTPUT / ran.whole, 1),
            "prompt_tokens_computed": ran.computed,
        }

    found = in_turn(rounds, run)
    ratios = {
        "first_token_median": _ratio(found, lambda run: run["first_token_median_s"]),
        "first_token_p90": _ratio(found, lambda run: run["first_token_p90_s"]),
        "tokens_per_second": round(1 / _ratio(found, lambda run: run["tokens_per_second"]), 2),
    }
    print(f"\narrivals: {requests} requests, {shared} + {SUFFIX} tokens, {OUTPUT} of output")
    for on, runs in found.items():
        for one in runs:
            print(
                f"    cache {'on' if on else 'off':4}"
                + "".join(f"{name} {value:<10}" for name, value in one.items())
            )
    median, p90 = ratios["first_token_median"], ratios["first_token_p90"]
    print(f"    first token, off / on: {median} (median), {p90} (p90), goal {GOALS['first_token']}")
    print(f"    tokens/s, on / off: {ratios['tokens_per_second']}, goal {GOALS['tokens_per_second']}")
    return {"requests": requests, "ratios": ratios, "off": found[False], "on": found[True]}


def samples(bench: Bench, rounds: int) -> dict[str, Any]:
    def run(on: bool) -> dict[str, Any]:
        prompt = bench.prompt(SAMPLED_PROMPT)
        bench.cache(False)  # samples share pages without it
        ran = bench.run([prompt], OUTPUT, SAMPLES) if on else bench.run([prompt] * SAMPLES, OUTPUT)
        return {
            "prompt_tokens_computed": ran.computed,
            "last_first_token_s": round(max(ran.first), 3),
            "whole_s": round(ran.whole, 3),
        }

    found = in_turn(rounds, run)
    ratio = _ratio(found, lambda run: run["last_first_token_s"])
    computed = max(run["prompt_tokens_computed"] for run in found[True])
    print(
        f"\nsamples: n={SAMPLES}, prompt of {SAMPLED_PROMPT}: {computed} prompt tokens computed, goal at most"
        f" {GOALS['prompt_tokens']}"
    )
    print(f"    {SAMPLES} requests / n={SAMPLES}: {ratio} times as long to the last one's first token")
    return {
        "prompt_tokens_computed": computed,
        "ratio_first_token": ratio,
        "requests": found[False],
        "n": found[True],
    }


def chat(bench: Bench, turns: int, rounds: int) -> dict[str, Any]:
    def run(on: bool) -> dict[str, Any]:
        talk = bench.prompt(SYSTEM)
        bench.cache(on)
        first, computed = [], []
        for _ in range(turns):
            talk += bench.prompt(QUESTION)
            ran = bench.run([talk], ANSWER)
            talk += ran.tokens["0.0"]
            first.append(round(ran.first[0], 4))
            computed.append(ran.computed)
        return {"first_token_s": first, "prompt_tokens_computed": computed}

    found = in_turn(rounds, run)
    ratio = _ratio(found, lambda run: run["first_token_s"][-1])
    print(
        f"\nchat: {SYSTEM} tokens, then {turns} turns of {QUESTION} + {ANSWER}: first token of turn {turns}"
    )
    for on, runs in found.items():
        for one in runs:
            last, tokens = one["first_token_s"][-1], one["prompt_tokens_computed"][-1]
            print(f"    cache {'on' if on else 'off':4}{1e3 * last:8.1f} ms, {tokens} prompt tokens computed")
    print(f"    off / on: {ratio}")
    return {"turns": turns, "ratio_last_turn": ratio, "off": found[False], "on": found[True]}


def _ratio(found: dict[bool, list[Any]], of: Callable[[Any], float]) -> float:
    """Off / on, the median over rounds."""
    return round(
        statistics.median(of(off) / of(on) for off, on in zip(found[False], found[True], strict=True)), 2
    )


def windows() -> dict[str, Any]:
    found = bytes_at_8k(PAGE_SIZE)
    print("\nwindows: MB of cache that a sequence of 8,192 tokens takes at most, bfloat16")
    for name, one in found.items():
        most = f"{one['prefill']['most_mb']:8.1f} (by rows {one['decode']['most_mb']:.1f})"
        print(
            f"    {name:18}{one['every_layer_keeps_all_mb']:8.1f} before,{most} after: {one['ratio']};"
            f" {', '.join(one['groups'])}"
        )
    return found


def reserved(requests: int) -> dict[str, Any]:
    found = unused_slots(requests, max_num_seqs=32)
    print(
        f"\nreserved and unused: share of the slots in owned pages, mean over steps, {requests} requests, 32"
        " at once"
    )
    for name, one in found.items():
        print(f"    {name:46}" + ", ".join(f"{part} {share:.2%}" for part, share in one.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = ("arrivals", "samples", "chat", "windows", "reserved")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="the demo model, fewer requests and rounds, nothing saved"
    )
    options = parser.parse_args()
    requests, shared, rounds, turns = (
        (16, PREFIX // 2, 1, 4) if options.quick else (REQUESTS, PREFIX, options.rounds, TURNS)
    )
    result: dict[str, Any] = {}
    if {"arrivals", "samples", "chat"} & {*options.parts}:
        # for all requests, with or without the cache
        pages = 1 + requests * -(-(shared + SUFFIX + OUTPUT) // PAGE_SIZE)
        bench = Bench(
            "demo" if options.quick else str(made_model("134m")),
            requests,
            2 * PREFIX // (1 + options.quick),
            pages,
        )
        result = {"model": "134m", "dtype": bench.dtype, "max_num_seqs": requests, "num_pages": pages}
        bench.run([bench.prompt(100)] * 2, 8)  # the first steps of a process are slower
        if "arrivals" in options.parts:
            result["arrivals"] = arrivals(bench, requests, shared, rounds)
        if "samples" in options.parts:
            result["samples"] = samples(bench, rounds)
        if "chat" in options.parts:
            result["chat"] = chat(bench, turns, rounds)
    if "windows" in options.parts:
        result["windows"] = windows()
    if "reserved" in options.parts:
        result["reserved"] = reserved(64 if options.quick else 512)
    if not options.quick:
        file = RESULTS / "sharing.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        save(
            "sharing",
            {"goals": GOALS, **{name: value for name, value in before.items() if name in parts}, **result},
        )


if __name__ == "__main__":
    main()
