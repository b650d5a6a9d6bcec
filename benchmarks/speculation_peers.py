"""Speculative decoding of other engines: tokens a second with n-gram drafts over those without.

    python -m benchmarks.speculation_peers [--peers vllm:5 llama.cpp:2 llama.cpp:10] [--streams 1 4]
        [--contexts 256] [--tasks edit extract chat] [--rounds 2] [--turns 2]

Prompts are those of benchmarks.speculation, as token ids. A peer is given with its number of drafts. Its
processes with and without drafts take turns; a figure is the median over turns of the ratio of their tokens a
second. vLLM runs the model's weights as bfloat16; llama.cpp reads the model's file, and has one stream only.
Answers are of fixed length, greedy, and compared with those without drafts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from benchmarks.peers.environments import PEERS_FOLDER, environment_python
from benchmarks.peers.separate import run_separate
from benchmarks.speculation import NEW_TOKENS, asked
from jengine.text.tokenizer import Tokenizer
from tools.smollm2 import smollm2

THREADS = 2


def batches(tasks: list[str], contexts: list[int], streams: list[int]) -> dict[str, list[list[int]]]:
    """Prompts of each cell, by its name."""
    tokenizer = Tokenizer.load(smollm2()).for_transformers("smollm2", 8192)
    found = {}
    for context in contexts:
        for task in tasks:
            draw = random.Random(f"{task} {context}")
            messages = [asked(tokenizer, task, context, draw) for _ in range(max(streams))]
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
                )
                for message in messages
            ]
            for count in streams:
                found[f"{task}, context {context}, streams {count}"] = prompts[:count]
    return found


def unpacked() -> Path:
    """The model as a folder of bfloat16 weights, which vLLM reads."""
    folder = PEERS_FOLDER / "weights" / smollm2().stem
    if not folder.exists():
        code = (
            "import sys, torch; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T;"
            "from transformers import GgufConfig;"
            "source, name, out = sys.argv[1:];"
            "how = dict(gguf_file=name, quantization_config=GgufConfig(dequantize=True));"
            "M.from_pretrained(source, dtype=torch.bfloat16, **how).save_pretrained(out);"
            "T.from_pretrained(source, gguf_file=name).save_pretrained(out)"
        )
        arguments = [str(smollm2().parent), smollm2().name, str(folder)]
        subprocess.run([str(environment_python("converter")), "-c", code, *arguments], check=True)
    return folder


def run(peer: str, drafts: int, prompts: list[list[list[int]]], rounds: int) -> list[dict[str, Any]]:
    """One process of a peer: rates and answers of each batch."""
    task = {
        "peer": peer,
        "model": str(unpacked() if peer == "vllm" else smollm2()),
        "drafts": drafts,
        "batches": prompts,
        "tokens": NEW_TOKENS,
        "max_model_len": max(len(one) for batch in prompts for one in batch) + NEW_TOKENS + 64,
        "threads": THREADS,
        "rounds": rounds,
    }
    found: list[dict[str, Any]] = run_separate(peer, "drafting", task)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", default=["vllm:5", "llama.cpp:2", "llama.cpp:10"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256])
    parser.add_argument("--tasks", nargs="+", default=["edit", "extract", "chat"])
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of a process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each")
    options = parser.parse_args()
    cells = batches(options.tasks, options.contexts, options.streams)
    results: dict[str, Any] = {}
    for entry in options.peers:
        peer, _, drafts = entry.partition(":")
        ratios: dict[str, list[float]] = {name: [] for name in cells}
        for _ in range(options.turns):
            turn = [run(peer, count, [*cells.values()], options.rounds) for count in (0, int(drafts))]
            for name, none, some in zip(cells, *turn, strict=True):
                without, rate = statistics.median(none["rates"]), statistics.median(some["rates"])
                ratios[name].append(rate / without)
                equal = sum(a == b for a, b in zip(none["answers"], some["answers"], strict=True))
                results.setdefault(entry, {})[name] = {
                    "tokens_per_second_without": without,
                    "ratio": statistics.median(ratios[name]),
                    "equal_answers": equal,
                    "answers": len(none["answers"]),
                }
        for name, cell in results[entry].items():
            print(
                f"{entry:12} {name}: {cell['tokens_per_second_without']:.0f} tokens/s, {cell['ratio']:.2f};"
                f" {cell['equal_answers']} of {cell['answers']} answers equal",
                flush=True,
            )
    save("speculation_peers", {"new_tokens": NEW_TOKENS, "peers": results})


if __name__ == "__main__":
    main()
