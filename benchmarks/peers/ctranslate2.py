"""CTranslate2 with a static batch: every row runs until the longest has ended."""

from __future__ import annotations

import json
from pathlib import Path

import ctranslate2

from benchmarks.peers.worker import Limits


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        self.words: list[str] = json.loads((folder / "vocabulary.json").read_text())
        self.generator = ctranslate2.Generator(
            str(folder), compute_type=precision, inter_threads=1, intra_threads=limits.threads
        )

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        tokens = max(outputs)
        answers = self.generator.generate_batch(
            [[self.words[i] for i in prompt] for prompt in prompts],
            max_length=tokens,
            min_length=tokens,  # generates this number of tokens in any case
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [answer.sequences_ids[0][:wanted] for answer, wanted in zip(answers, outputs, strict=True)]
