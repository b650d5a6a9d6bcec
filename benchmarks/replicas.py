"""Two replicas on prompts with shared beginnings: routed by prefix and predicted first token, and at random.

    python -m benchmarks.replicas [--model demo] [--replicas 2] [--groups 8] [--requests 240] [--rate 12]
        [--rounds 2]

Requests arrive at random times, at `rate` a second on average. Each has one of `groups` beginnings of 512
tokens and 32 further tokens, and generates 16. Engines are processes that share the CPUs. Both ways get
the same arrivals, in turn, with empty caches. Printed: the share of prompt tokens found in a prefix cache,
and the median and 90th percentile of the time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import made_model, save
from jengine import AsyncLLM, EngineConfig, SamplingParams, Tokenizer
from jengine.engine.operations import ResetPrefixCache
from jengine.fleet import members as module
from jengine.serving.config import ServerConfig
from jengine.serving.processes.engine_fleet import maker

SHARED, OWN, NEW_TOKENS = 512, 32, 16


def trace(groups: int, requests: int, rate: float, vocab: int, seed: int) -> list[tuple[float, list[int]]]:
    """Times and prompts."""
    draw, time_of, found = random.Random(seed), 0.0, []
    beginnings = [[draw.randrange(2, vocab) for _ in range(SHARED)] for _ in range(groups)]
    for _ in range(requests):
        time_of += draw.expovariate(rate)
        found.append((time_of, [*draw.choice(beginnings), *[draw.randrange(2, vocab) for _ in range(OWN)]]))
    return found


async def run(llm: AsyncLLM, arrivals: list[tuple[float, list[int]]]) -> dict[str, float]:
    """Serves the trace. Returns the hit rate, and seconds to the first token."""
    await llm.do(ResetPrefixCache())
    before, begun, first = llm.load, time.perf_counter(), list[float]()
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    async def one(at: float, prompt: list[int]) -> None:
        await asyncio.sleep(at - (time.perf_counter() - begun))
        sent = time.perf_counter()
        async for _ in llm.generate({"prompt_token_ids": prompt}, params, output_kind="delta"):
            if sent:
                first.append(time.perf_counter() - sent)
                sent = 0.0

    await asyncio.gather(*[one(*arrival) for arrival in arrivals])
    after = llm.load
    queries = after.prefix_queries - before.prefix_queries
    return {
        "hit_rate": (after.prefix_hits - before.prefix_hits) / queries,
        "first_token_ms": 1e3 * statistics.median(first),
        "first_token_p90_ms": 1e3 * statistics.quantiles(first, n=10)[-1],
    }


async def compare(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    model = options.model if options.model == "demo" else str(made_model(options.model))
    config = EngineConfig.of(model, {"max_model_len": 1024, "num_pages": options.pages})
    server = ServerConfig(data_parallel_size=options.replicas, watchdog_seconds=0.0)
    engine = maker(server, config)(None)
    await asyncio.to_thread(engine.start)
    assert engine.info.tokenizer_folder is not None
    tokenizer = Tokenizer.load(Path(engine.info.tokenizer_folder))
    found: dict[str, list[dict[str, float]]] = {"routed": [], "random": []}
    by_prefix, draw = module.first_token_seconds, random.Random(0)
    ways: dict[str, Any] = {"routed": by_prefix, "random": lambda *facts: draw.random()}
    async with AsyncLLM.over(engine.backend, tokenizer) as llm:
        for number in range(options.rounds + 1):
            arrivals = trace(
                options.groups, options.requests, options.rate, llm.backend.limits.vocab_size, number
            )
            for name in [*ways] if number % 2 else reversed([*ways]):
                module.first_token_seconds = ways[name]
                result = await run(llm, arrivals)
                if number:  # the first round warms up
                    found[name].append(result)
    module.first_token_seconds = by_prefix
    return {
        name: {key: round(statistics.median(one[key] for one in each), 3) for key in each[0]}
        for name, each in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--pages", type=int, default=256, help="of each cache; 32 hold a shared beginning")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results = asyncio.run(compare(options))
    for name, result in results.items():
        print(name, result)
    save("replicas", {**vars(options), "results": results})


if __name__ == "__main__":
    main()
