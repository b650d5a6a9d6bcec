"""vLLM as a library, with its defaults except for prefix caching."""

from __future__ import annotations

from pathlib import Path

import vllm

from benchmarks.peers.worker import Limits


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        self.llm = vllm.LLM(
            str(folder),
            dtype=precision,
            max_model_len=limits.tokens,
            max_num_seqs=limits.sequences,
            enable_prefix_caching=False,
            **limits.options,
        )

    def generate(
        self, prompts: list[list[int]], outputs: list[int], temperature: float = 0.0
    ) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for tokens in outputs
        ]
        given = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [
            list(answer.outputs[0].token_ids) for answer in self.llm.generate(given, params, use_tqdm=False)
        ]
