"""Compares quantized formats with bfloat16: perplexity of SmolLM2-135M-Instruct, and memory and speed of the
134M shape.

    python -m benchmarks.quantization [--parts perplexity speed] [--arms ... [--update]] [--repeat 5]
    [--quick]

Perplexity is measured on a fixed English text (english.txt), on one of documentation and code
(technical.txt), and on greedy float32 answers to chats (chats.json and tests/golden/smollm2.json). Each token
is predicted from all earlier ones. Each arm's ratio to bfloat16 has the standard error of the ratio's
logarithm over tokens. The checkpoint is stored in four bits with groups of 32 (GGUF's Q4_1), and other
formats start from its dequantized weights. int4 is calibrated on texts and chats that the model generated.
Speed is measured with all engines in one process, in turn: one stream (prompt 128, 64 output tokens), 32
streams (prompt 128, 32 output tokens), and prompts of 1024 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.chats import CHATS
from benchmarks.machine import MODELS, RESULTS, made_model, save
from jengine import LLM, SamplingParams
from tests.golden.smollm2 import ANSWERS
from tools.smollm2 import smollm2

PLAIN = {"quantization": "none"}
CALIBRATION = str(MODELS / "calibration_chats.txt")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # as in the chat template
ARMS: dict[str, dict[str, Any]] = {
    "bfloat16": PLAIN,
    "float32": {"dtype": "float32", **PLAIN},
    "as stored": {},
    "int4": {"quantization": "int4"},
    "int4, groups of 128": {"quantization": "int4", "quantization_group_size": 128},
    "int8 weights": {"quantization": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "fp8": {"quantization": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8", **PLAIN},
    "fp8 cache": {"kv_cache_dtype": "fp8", **PLAIN},
    "w8a8, int8 cache": {"quantization": "w8a8", "kv_cache_dtype": "int8"},
    "w4a8": {"quantization": "w4a8"},
    "w4a8, calibrated": {"quantization": "w4a8", "calibration_data": CALIBRATION},
    "int4, calibrated": {"quantization": "int4", "calibration_data": CALIBRATION},
    "int4_mixed, calibrated": {"quantization": "int4_mixed", "calibration_data": CALIBRATION},
}
# Few programs, since every arm compiles its own: one tile bucket, three row buckets.
TABLE: dict[str, Any] = {
    "max_num_seqs": 32,
    "tile_size": 256,
    "max_num_batched_tokens": 288,
    "progress": False,
}
TEXTS = {name: Path(__file__).parent / f"{name}.txt" for name in ("english", "technical")}
SCORED = (*TEXTS, "chats")
PIECE = 512  # tokens of the text per sequence


def make(model: str, arm: str, **options: Any) -> LLM:
    with warnings.catch_warnings(action="ignore"):  # the warning that fp8 is emulated on a CPU
        return LLM(model, **{"dtype": "bfloat16", **ARMS[arm], **TABLE, **options})


Scored = tuple[list[int], int]  # token ids, and the index of the first scored one


def texts(tokenizer: Any) -> dict[str, list[Scored]]:
    """The texts in pieces, and chats, in which only the answers are scored."""
    pieces: dict[str, list[Scored]] = {}
    for name, file in TEXTS.items():
        ids = tokenizer.encode(file.read_text(), add_special_tokens=False)
        pieces[name] = [(ids[start : start + PIECE], 1) for start in range(0, len(ids), PIECE)]
    asked = [chat for file in (ANSWERS, CHATS) for chat in json.loads(file.read_text())]
    chats = [(chat["prompt"] + chat["answer"], len(chat["prompt"])) for chat in asked]
    return {**pieces, "chats": chats}


def write_calibration() -> None:
    """Writes text that the model generates, if the file does not exist: texts, and chats with its own greedy
    answers.

    The model makes up the questions, too. So the file has none of the scored text, and about 60,000 tokens.
    """
    file = Path(CALIBRATION)
    if file.exists():
        return
    llm = make(str(smollm2()), "bfloat16", max_model_len=1024)

    def ids(text: str) -> list[int]:
        return llm.tokenizer.encode(text, add_special_tokens=False)

    def generate(prompts: list[list[int]], **options: Any) -> list[list[int]]:
        params = [SamplingParams(seed=n, **options) for n in range(len(prompts))]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    def text(tokens: list[int]) -> str:
        return llm.tokenizer.decode(tokens, skip_special_tokens=False)

    [end], answer = ids("<|im_end|>"), ids("\n<|im_start|>assistant\n")
    start = ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    texts = generate([ids("<|endoftext|>")] * 48, temperature=0.8, max_tokens=512, ignore_eos=True)
    questions = generate([start] * 160, temperature=1.0, max_tokens=60, stop_token_ids=[end])
    prompts = [start + question + [end] * (question[-1] != end) + answer for question in questions]
    answers = generate(prompts, temperature=0.0, max_tokens=200, stop_token_ids=[end])
    chats = [text(both[0] + both[1]) + "\n" for both in zip(prompts, answers, strict=True)]
    share = [len(chats) * n // len(texts) for n in range(len(texts) + 1)]  # texts and chats alternate
    parts = [
        "<|endoftext|>" + text(one) + "".join(chats[share[n] : share[n + 1]]) for n, one in enumerate(texts)
    ]
    file.write_text("".join(parts))


def perplexity(arm: str, base: dict[str, list[float]]) -> dict[str, Any]:
    """Perplexities and, if bfloat16 was measured before, the standard errors of their ratios to bfloat16's.

    Args:
        base: bfloat16's log probabilities by text, which the arm "bfloat16" fills.
    """
    if "calibration_data" in ARMS[arm]:
        write_calibration()
    llm = make(str(smollm2()), arm, max_model_len=1024, max_num_seqs=4)
    found: dict[str, Any] = {}
    for name, pieces in texts(llm.tokenizer).items():
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([ids for ids, _ in pieces], params, use_tqdm=False)
        scores = []
        for (ids, start), output in zip(pieces, outputs, strict=True):
            assert output.prompt_logprobs is not None
            entries = zip(ids[start:], output.prompt_logprobs[start:], strict=True)
            scores += [entry[token].logprob for token, entry in entries if entry is not None]
        found |= {name: math.exp(-statistics.fmean(scores)), f"{name}_tokens": len(scores)}
        if arm == "bfloat16":
            base[name] = scores
        if name in base:
            differences = [score - other for score, other in zip(scores, base[name], strict=True)]
            found[f"{name}_ratio_error"] = statistics.stdev(differences) / math.sqrt(len(scores))
    return {**found, **sizes(llm)}


def sizes(llm: LLM) -> dict[str, float]:
    """MiB of weights, and KiB of cache per token."""
    worker: Any = llm.engine.runner.worker
    state = worker.state
    weights, cache = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (state.leaves, state.cache))
    spec = worker.spec
    return {
        "weights_mib": round(weights / 2**20, 2),
        "cache_kib_a_token": round(cache / spec.num_pages / spec.page_size / 2**10, 3),
    }


def speeds(llm: LLM, vocab: int) -> dict[str, float]:
    """Tokens per second: one stream, 32 streams, prompts."""
    rng = np.random.default_rng(1)

    def run(count: int, prompt: int, out: int) -> float:
        prompts = [rng.integers(2, vocab, prompt).tolist() for _ in range(count)]
        start = time.perf_counter()
        llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True), use_tqdm=False
        )
        return count * (out if out > 1 else prompt) / (time.perf_counter() - start)

    return {"one_stream": run(1, 128, 64), "streams_32": run(32, 128, 32), "prompts": run(2, 1024, 1)}


def measure_speed(model: str, arms: list[str], repeat: int) -> dict[str, Any]:
    llms = {arm: make(model, arm, max_model_len=2048, kv_cache_memory="256MiB") for arm in arms}
    vocab = next(iter(llms.values())).engine.model.vocab_size
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(repeat):
        for arm, llm in llms.items():
            runs[arm].append(speeds(llm, vocab))
    medians = {
        arm: {name: statistics.median(run[name] for run in taken) for name in taken[0]}
        for arm, taken in runs.items()
    }
    return {arm: {**sizes(llms[arm]), **medians[arm], "runs": runs[arm]} for arm in arms}


def show_perplexity(result: dict[str, Any]) -> None:
    base = result.get("bfloat16", next(iter(result.values())))
    texts = "".join(f"{name:>12}{'/ bfloat16':>12}" for name in SCORED)
    print(f"\n{'':20}{texts}{'weights MiB':>13}{'cache KiB/token':>17}")
    for arm, got in result.items():
        columns = "".join(f"{got[name]:12.3f}{got[name] / base[name]:12.4f}" for name in SCORED)
        print(f"{arm:20}{columns}{got['weights_mib']:13.2f}{got['cache_kib_a_token']:17.3f}")


def show_speed(result: dict[str, Any]) -> None:
    base = result["bfloat16"]
    names = {"one_stream": "1 stream", "streams_32": "32 streams", "prompts": "prompts"}
    print(
        f"\ntokens/s (/ bfloat16)\n{'':20}{'weights MiB':>13}"
        + "".join(f"{name:>18}" for name in names.values())
    )
    for arm, got in result.items():
        speed = "".join(f"{got[name]:11.1f} ({got[name] / base[name]:4.2f})" for name in names)
        print(f"{arm:20}{got['weights_mib']:13.2f}{speed}")


def update(found: dict[str, Any]) -> None:
    """Replaces these arms' perplexities in the saved results, and removes results for other versions of the
    texts.
    """
    known = json.loads((RESULTS / "quantization_perplexity.json").read_text())["perplexity"] | found
    current = next(iter(found.values()))
    for text in SCORED:
        for row in known.values():
            if row.get(f"{text}_tokens") != current[f"{text}_tokens"]:
                for field in (text, f"{text}_tokens", f"{text}_ratio_error"):
                    row.pop(field, None)
    save("quantization_perplexity", {"perplexity": {arm: known[arm] for arm in ARMS if arm in known}})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=("perplexity", "speed"), default=["perplexity", "speed"]
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="fewer than all; nothing is saved then")
    parser.add_argument(
        "--update", action="store_true", help="replace these arms' perplexities among the saved ones"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two arms, nothing saved; speed of the demo model"
    )
    options = parser.parse_args()
    arms = ["bfloat16", "w8a8"] if options.quick else options.arms or list(ARMS)
    result: dict[str, Any] = {}
    base: dict[str, list[float]]
    if "perplexity" in options.parts:
        result["perplexity"], base = {}, {}
        for arm in arms:
            result["perplexity"][arm] = perplexity(arm, base)
            if options.update:
                update(result["perplexity"])
        show_perplexity(result["perplexity"])
    if "speed" in options.parts:
        result["speed"] = measure_speed(
            "demo" if options.quick else str(made_model("134m")), arms, 1 if options.quick else options.repeat
        )
        show_speed(result["speed"])
    if not options.quick and options.arms is None:
        save("quantization" if len(options.parts) == 2 else f"quantization_{options.parts[0]}", result)


if __name__ == "__main__":
    main()
