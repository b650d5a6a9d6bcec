"""The Llama that the benchmarks of the engine and of transformers run, and their loads."""

from __future__ import annotations

from typing import Any, NamedTuple

from tools.make_model import COMMON, SHAPES


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
FULL = Load(COMMON | SHAPES["8b"], (1, 32, 256), prompt=1024, steps=64, chunk=8192)
SMALL = Load(
    COMMON | SHAPES["134m"] | TINY | {"num_key_value_heads": 2, "head_dim": 32},
    (1, 8),
    prompt=16,
    steps=4,
    chunk=32,
)
