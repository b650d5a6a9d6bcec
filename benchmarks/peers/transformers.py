"""transformers with a static batch: prompts are padded on the left, and every row runs until the longest has
ended.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from benchmarks.peers.worker import Limits


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        torch.set_num_threads(limits.threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, precision)
        ).eval()
        self.config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        self.model.generation_config = self.config

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            answers = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(outputs))
        return [
            answer[longest : longest + tokens].tolist()
            for answer, tokens in zip(answers, outputs, strict=True)
        ]
