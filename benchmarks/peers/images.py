"""transformers with images, in a separate process under its own Python; see benchmarks/images.py.

Reads a line of JSON with the options, then one for each list of requests, and answers each with a line.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil


class Engine:
    """Static batches: prompts are padded on the left."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self.processor = SmolVLMImageProcessorPil(**options["processor"])
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            options["model"], dtype=torch.float32
        ).eval()
        self.batch, self.tokens = options["batch"], options["tokens"]
        self.model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0
        )
        self.encoder_seconds = 0.0
        encode = self.model.model.get_image_features

        @functools.wraps(encode)  # transformers looks at the parameters
        def timed(*values: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            found = encode(*values, **named)
            self.encoder_seconds += time.perf_counter() - begun
            return found

        self.model.model.get_image_features = timed

    def answer(self, images: list[str], prompts: list[list[int]]) -> dict[str, Any]:
        begun, worked, self.encoder_seconds = time.perf_counter(), time.process_time(), 0.0
        tokens: list[list[int]] = []
        for start in range(0, len(prompts), self.batch):
            tokens += self._batch(images[start : start + self.batch], prompts[start : start + self.batch])
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - begun,
            "processor_seconds": time.process_time() - worked,
            "encoder_seconds": self.encoder_seconds,
        }

    def _batch(self, images: list[str], prompts: list[list[int]]) -> list[list[int]]:
        read = [[Image.open(image).convert("RGB")] for image in images]
        seen = self.processor(read, return_tensors="np")
        longest = max(map(len, prompts))
        ids = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = np.array([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            answers = self.model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                pixel_values=torch.tensor(seen["pixel_values"]),
                pixel_attention_mask=torch.tensor(seen["pixel_attention_mask"]),
                max_new_tokens=self.tokens,
            )
        found: list[list[int]] = answers[:, longest:].tolist()
        return found


def main() -> None:
    engine = Engine(json.loads(sys.stdin.readline()))
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
