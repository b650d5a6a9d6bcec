"""What eight bits cost and give: perplexity of the demo model, and memory and speed of the 134M shape, against bfloat16.

    python -m benchmarks.quantization [--parts perplexity speed] [--tokens 40000] [--repeat 5] [--quick]

Perplexity is that of pieces of Python that the demo model was not trained on, each token given all before it. Speed is
taken with all engines in one process, in turn: one stream (prompt 128, 64 tokens out), 32 streams (prompt 128, 32 tokens out), and
prompts of 1024 tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from typing import Any

import jax
import numpy as np

from benchmarks.machine import made_model, save
from jengine import LLM, SamplingParams

ARMS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8 weights": {"quantization": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "fp8": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "w8a8, int8 cache": {"quantization": "w8a8", "kv_cache_dtype": "int8"},
}
# Few programs, since every arm compiles its own: one tile bucket, three row buckets.
TABLE: dict[str, Any] = {"max_num_seqs": 32, "tile_size": 256, "max_num_batched_tokens": 288, "progress": False}
PIECE = 1000  # tokens of a piece that are read at most


def make(model: str, arm: str, **options: Any) -> LLM:
    with warnings.catch_warnings(action="ignore"):  # that fp8 is emulated on a CPU
        return LLM(model, **{"dtype": "bfloat16", **ARMS[arm], **TABLE, **options})


def held_out(tokenizer: Any, limit: int) -> list[list[int]]:
    """Pieces as token ids, from beginning- to end-of-sequence, about `limit` tokens in all, spread over the whole."""
    from tools.train_demo import read_corpus

    pieces = [[0, *tokenizer.encode(text, add_special_tokens=False), 1][:PIECE] for text in read_corpus()[1]]
    order = np.random.default_rng(0).permutation(len(pieces))
    taken = np.searchsorted(np.cumsum([len(pieces[i]) for i in order]), limit)
    return [pieces[i] for i in order[: taken + 1]]


def perplexity(arm: str, tokens: int) -> dict[str, Any]:
    llm = make("demo", arm)
    pieces = held_out(llm.tokenizer, tokens)
    outputs = llm.generate(pieces, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scores = []
    for piece, output in zip(pieces, outputs, strict=True):
        assert output.prompt_logprobs is not None
        scores += [entry[token].logprob for token, entry in zip(piece[1:], output.prompt_logprobs[1:], strict=True) if entry is not None]
    return {"perplexity": math.exp(-statistics.fmean(scores)), "tokens": len(scores), **sizes(llm)}


def sizes(llm: LLM) -> dict[str, float]:
    """MiB of weights, and KiB of cache a token."""
    runner: Any = llm.engine.runner
    weights, cache = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (runner.params, runner.cache))
    spec = runner.spec
    return {"weights_mib": round(weights / 2**20, 2), "cache_kib_a_token": round(cache / spec.num_pages / spec.page_size / 2**10, 3)}


def speeds(llm: LLM, vocab: int) -> dict[str, float]:
    """Tokens a second: one stream, 32 streams, prompts."""
    rng = np.random.default_rng(1)

    def run(count: int, prompt: int, out: int) -> float:
        prompts = [rng.integers(2, vocab, prompt).tolist() for _ in range(count)]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True), use_tqdm=False)
        return count * (out if out > 1 else prompt) / (time.perf_counter() - start)

    return {"one_stream": run(1, 128, 64), "streams_32": run(32, 128, 32), "prompts": run(2, 1024, 1)}


def measure_speed(model: str, arms: list[str], repeat: int) -> dict[str, Any]:
    llms = {arm: make(model, arm, max_model_len=2048, kv_cache_memory="256MiB") for arm in arms}
    vocab = next(iter(llms.values())).engine.model.vocab_size
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(repeat):
        for arm, llm in llms.items():
            runs[arm].append(speeds(llm, vocab))
    medians = {arm: {name: statistics.median(run[name] for run in taken) for name in taken[0]} for arm, taken in runs.items()}
    return {arm: {**sizes(llms[arm]), **medians[arm], "runs": runs[arm]} for arm in arms}


def show_perplexity(result: dict[str, Any]) -> None:
    base = result["bfloat16"]["perplexity"]
    print(f"\n{'':20}{'perplexity':>12}{'/ bfloat16':>12}{'weights MiB':>13}{'cache KiB/token':>17}")
    for arm, got in result.items():
        ratio = got["perplexity"] / base
        print(f"{arm:20}{got['perplexity']:12.3f}{ratio:12.4f}{got['weights_mib']:13.2f}{got['cache_kib_a_token']:17.3f}")


def show_speed(result: dict[str, Any]) -> None:
    base = result["bfloat16"]
    names = {"one_stream": "1 stream", "streams_32": "32 streams", "prompts": "prompts"}
    print(f"\ntokens/s (/ bfloat16)\n{'':20}{'weights MiB':>13}" + "".join(f"{name:>18}" for name in names.values()))
    for arm, got in result.items():
        speed = "".join(f"{got[name]:11.1f} ({got[name] / base[name]:4.2f})" for name in names)
        print(f"{arm:20}{got['weights_mib']:13.2f}{speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("perplexity", "speed"), default=["perplexity", "speed"])
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two arms, the demo model, nothing saved")
    options = parser.parse_args()
    arms = ["bfloat16", "w8a8"] if options.quick else list(ARMS)
    result: dict[str, Any] = {}
    if "perplexity" in options.parts:
        result["perplexity"] = {arm: perplexity(arm, 2000 if options.quick else options.tokens) for arm in arms}
        show_perplexity(result["perplexity"])
    if "speed" in options.parts:
        result["speed"] = measure_speed("demo" if options.quick else str(made_model("134m")), arms, 1 if options.quick else options.repeat)
        show_speed(result["speed"])
    if not options.quick:
        save("quantization" if len(options.parts) == 2 else f"quantization_{options.parts[0]}", result)


if __name__ == "__main__":
    main()
