"""The Llama that the benchmarks of the engine and of transformers run, and their loads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tools.make_model import COMMON, SHAPES, tensor_shapes


class Load(NamedTuple):
    """A load to measure.

    Attributes:
        config: the content of a config.json.
        batches: numbers of sequences that decode together, after prompts of `prompt` tokens.
        steps: number of decode steps.
        chunk: tokens that are prefilled together, as one prompt or as several of `prompt` tokens.
    """

    config: dict[str, Any]
    batches: tuple[int, ...]
    prompt: int
    steps: int
    chunk: int


TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORKING = 1.5 * 2**30  # bytes of a step's temporaries, at most
FULL = Load(COMMON | SHAPES["8b"], (1, 32, 256), prompt=1024, steps=64, chunk=8192)
SMALL = Load(
    COMMON | SHAPES["134m"] | TINY | {"num_key_value_heads": 2, "head_dim": 32},
    (1, 8),
    prompt=16,
    steps=4,
    chunk=32,
)
ONE_B = FULL._replace(config=COMMON | SHAPES["1b"])
FITTING = FULL, FULL._replace(batches=(1, 32)), ONE_B, ONE_B._replace(batches=(1, 32))


def tokens_out(size: Load, batch: int) -> int:
    """Output tokens per sequence, enough that no sequence ends during prefill of the others or during the
    measured steps.
    """
    return batch * size.prompt // size.chunk + size.steps + size.steps // 4 + 16


def needed(size: Load) -> float:
    """Bytes of a load's weights, cache and temporaries in bfloat16, about."""
    config, rows = size.config, max(size.batches)
    weights = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2.2 * (weights + rows * (size.prompt + tokens_out(size, rows)) * token) + WORKING


def largest(room: int | None) -> Load:
    """The largest of FITTING that this many bytes hold, or the smallest. room: None: unknown."""
    return next((size for size in FITTING if room is None or needed(size) <= room), FITTING[-1])
