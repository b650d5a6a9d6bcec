"""Benchmarks of a model in this process: throughput of many requests, latency of a batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from jengine.api.llm import LLM
from jengine.capacity.bench.workload import BenchRequest
from jengine.core.request import SamplingParams

RANKS = (10, 25, 50, 75, 90, 99)


def throughput(
    llm: LLM, requests: list[BenchRequest], *, n: int = 1, progress: bool = True
) -> dict[str, Any]:
    """Runs all requests at the same time. Names as in `vllm bench throughput --output-json`."""
    params = _params(requests, n)
    start = time.perf_counter()
    outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=progress)
    seconds = time.perf_counter() - start
    for output in outputs:
        output.require_answer()
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": prompts + tokens,
        "total_output_tokens": tokens,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (prompts + tokens) / seconds,
        "output_tokens_per_second": tokens / seconds,
    }


def latency(
    llm: LLM, requests: list[BenchRequest], rounds: Iterable[object], *, warm_up: int, n: int = 1
) -> dict[str, Any]:
    """Runs a batch repeatedly, without using cached pages. Names as in `vllm bench latency --output-json`.

    Args:
        rounds: one item for each measured run; may be a progress bar.
        warm_up: number of runs before them.
    """
    params = _params(requests, n)

    def once() -> float:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate([request.prompt for request in requests], params, use_tqdm=False)
        return time.perf_counter() - start

    for _ in range(warm_up):
        once()
    latencies = [once() for _ in rounds]
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(rank): float(np.percentile(latencies, rank)) for rank in RANKS},
    }


def _params(requests: list[BenchRequest], n: int) -> list[SamplingParams]:
    return [SamplingParams(n=n, temperature=1.0, max_tokens=r.output, ignore_eos=True) for r in requests]
