"""The workload of every engine: the same token ids, drawn from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np

SEQUENCES = 32
PROMPT, OUTPUT = (16, 512), (16, 256)  # tokens of the batch's requests, uniform
# prompt and output tokens of the single stream; the first output token belongs to the prefill
STREAM = (128, 129)
PREFILL = 1024
# prompts whose tokens are compared, and tokens of each: with random weights, outputs soon repeat
CHECK = (32, 8)
MAX_MODEL_LEN = PREFILL + 64
FIRST_ID = 2  # 0 and 1 begin and end sequences


def workload(vocabulary: int, scale: float = 1.0) -> dict[str, Any]:
    """The first prompt, and the measurements' prompts and outputs. `scale` shortens outputs and reduces the
    batch, for trials."""
    rng = np.random.default_rng(6)

    def prompt(tokens: int) -> list[int]:
        return [int(i) for i in rng.integers(FIRST_ID, vocabulary, tokens)]

    def scaled(tokens: int) -> int:
        return max(2, round(tokens * scale))

    lengths = rng.integers(*PROMPT, SEQUENCES, endpoint=True)
    outputs = [scaled(int(tokens)) for tokens in rng.integers(*OUTPUT, SEQUENCES, endpoint=True)]
    requests = scaled(SEQUENCES)
    count, checked = CHECK
    several = [prompt(tokens) for tokens in (64, 200) * (requests // 2)]
    return {
        "first": prompt(STREAM[0]),
        "check": {
            "prompts": [prompt(PROMPT[0] * (1 + i)) for i in range(count)],
            "outputs": [checked] * count,
        },
        "measures": {
            "warm up": {"tokens": scaled(8), "batches": [[prompt(STREAM[0])], [prompt(PREFILL)], several]},
            "stream": {"tokens": scaled(STREAM[1]), "prompts": [prompt(STREAM[0]) for _ in range(2)]},
            "prefill": {"prompts": [prompt(PREFILL) for _ in range(3)]},
            "batch": {"prompts": [prompt(int(n)) for n in lengths[:requests]], "outputs": outputs[:requests]},
        },
    }
