"""The Llama that the engine and transformers run, and how much of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from tools.make_model import COMMON, SHAPES


class Load(NamedTuple):
    """What is timed.

    Attributes:
        config: as a config.json has it.
        batches: of sequences that decode together, after prompts of `prompt` tokens.
        steps: of decoding.
        chunk: tokens that are prefilled together: one prompt, or some of `prompt` tokens.
    """

    config: dict[str, Any]
    batches: tuple[int, ...]
    prompt: int
    steps: int
    chunk: int


TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
FULL = Load(COMMON | SHAPES["8b"], (1, 32, 256), prompt=1024, steps=64, chunk=8192)
SMALL = Load(COMMON | SHAPES["134m"] | TINY | {"num_key_value_heads": 2, "head_dim": 32}, (1, 8), prompt=16, steps=4, chunk=32)
