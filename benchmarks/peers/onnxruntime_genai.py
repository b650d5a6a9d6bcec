"""onnxruntime-genai with a static batch: every row runs until the longest has ended."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime_genai as og

from benchmarks.peers.worker import Limits


class Engine:
    def __init__(self, folder: Path, precision: str, limits: Limits) -> None:
        config = og.Config(str(folder))
        config.overlay(
            f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {limits.threads}}}}}}}}}'
        )
        self.model = og.Model(config)
        self.padding = json.loads((folder / "genai_config.json").read_text())["model"]["pad_token_id"]

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        longest, tokens = max(map(len, prompts)), max(outputs)
        params = og.GeneratorParams(self.model)
        length = longest + tokens
        params.set_search_options(
            batch_size=len(prompts), do_sample=False, max_length=length, min_length=length
        )
        generator = og.Generator(self.model, params)
        # on the right, where attention skips it
        padded = [prompt + [self.padding] * (longest - len(prompt)) for prompt in prompts]
        generator.append_tokens(np.array(padded, np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
        return [
            generator.get_sequence(i)[longest : longest + wanted].tolist() for i, wanted in enumerate(outputs)
        ]
