"""One peer with or without drafts, in a separate process under its own Python; see speculation_peers.py.

A task in JSON on standard input names the peer, the model, the number of drafts (0: none), and batches of
prompts. The first round fills prefix caches and is not measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Vllm:
    """vLLM with its n-gram drafts and its prefix cache."""

    def __init__(self, task: dict[str, Any]) -> None:
        import vllm

        drafts = {
            "method": "ngram",
            "num_speculative_tokens": task["drafts"],
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
        self.vllm, self.llm = (
            vllm,
            vllm.LLM(
                task["model"],
                dtype="bfloat16",
                max_model_len=task["max_model_len"],
                max_num_seqs=max(len(prompts) for prompts in task["batches"]),
                enable_prefix_caching=True,
                speculative_config=drafts if task["drafts"] else None,
            ),
        )

    def answer(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        given = [self.vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(given, params, use_tqdm=False)]


class LlamaCpp:
    """llama.cpp with llama-cpp-python's prompt lookup: one stream, which keeps the last prompt's prefix."""

    def __init__(self, task: dict[str, Any]) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        drafts = LlamaPromptLookupDecoding(max_ngram_size=4, num_pred_tokens=task["drafts"])
        self.llama = Llama(
            task["model"],
            n_ctx=task["max_model_len"],
            n_threads=task["threads"],
            n_threads_batch=task["threads"],
            draft_model=drafts if task["drafts"] else None,
            verbose=False,
        )

    def answer(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            found = self.llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
            answers.append([int(next(found)) for _ in range(tokens)])
        return answers


PEERS = {"vllm": Vllm, "llama.cpp": LlamaCpp}


def main() -> None:
    task = json.load(sys.stdin)
    peer = PEERS[task["peer"]](task)
    results = []
    for prompts in task["batches"]:
        if task["peer"] == "llama.cpp":
            prompts = prompts[:1]
        rates, answers = [], None
        for number in range(task["rounds"] + 1):
            begun = time.perf_counter()
            answers = peer.answer(prompts, task["tokens"])
            seconds = time.perf_counter() - begun
            if number:
                rates.append(len(prompts) * task["tokens"] / seconds)
        results.append({"rates": rates, "answers": answers})
    Path(task["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
