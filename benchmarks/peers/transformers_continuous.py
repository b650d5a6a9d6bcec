"""transformers with continuous batching, without prefix sharing."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from benchmarks.peers.worker import Limits

PAGE = 32  # tokens
WAIT = 600  # seconds


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        torch.set_num_threads(limits.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
        self.manager = model.eval().init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            transformers.ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=limits.sequences * limits.tokens // PAGE,
                max_batch_tokens=limits.tokens,
                max_requests_per_batch=limits.sequences,
                allow_block_sharing=False,
            ),
        )
        self.manager.start()

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        names = [
            self.manager.add_request(prompt, max_new_tokens=tokens)
            for prompt, tokens in zip(prompts, outputs, strict=True)
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            answer = self.manager.get_result(timeout=WAIT)
            if answer is None or answer.error:
                raise RuntimeError(f"no answer: {answer}")
            if answer.is_finished():
                answers[answer.request_id] = list(answer.generated_tokens)
        return [answers[name] for name in names]

    def close(self) -> None:
        self.manager.stop(timeout=WAIT)
