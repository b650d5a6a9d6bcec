"""Tiny random models: their configurations, weights and recorded results. Needs numpy only, and safetensors
to write a folder.

A weight depends on its variant's name and its own, so no weights are stored; the generator's raw bits are
used, which numpy promises never to change.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.golden.variants import VARIANTS, tensor_shapes

REPEATING = ("gpt2", "opt", "granite_biases", "starcoder2", "falcon_7b", "falcon_serial", "qwen3_5_text")
# in names of tensors of all experts
OF_EXPERTS = (".router.", ".gate.", ".experts.", "input_linear.", "output_linear.")
EACH_EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in names of tensors of one expert
ADD_ONE = ("gemma2", "gemma3_", "qwen3_next", "qwen3_5", "nemotron")  # to the weights of norms
# with 0.5 these say their last token again and again
TABLES = {"gemma": 0.05, **dict.fromkeys(REPEATING, 0.15)}


def max_model_len(variant: str) -> int:
    """Tokens a sequence may have: every prompt and continuation fits. Beyond the trained context for
    rope_dynamic_beyond.
    """
    return 64 if variant in ("rope_dynamic_inside", "phi3_longrope_inside", "phimoe_longrope_inside") else 192


def weights(variant: str, config: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Every tensor in float32. Scales are such that attention is uneven and the best tokens stand clear.
    config: None is the variant's.
    """
    shapes = tensor_shapes(VARIANTS[variant] if config is None else config)
    return {name: weight(variant, name, shape) for name, shape in shapes.items()}


def weight(variant: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One of them."""
    # experts are alike in pairs, so that it does not matter which of them a tie gives
    ties = variant.endswith("ties")
    twin = EACH_EXPERT.sub(lambda found: f".experts.{int(found[1]) // 2 * 2}.", name) if ties else name
    noise = uniform(f"{variant}/{twin}", math.prod(shape)).reshape(shape)
    if name.endswith("sinks"):
        scaled = (4.0 if variant.endswith("sinks") else 0.0) + noise
    elif name.endswith(("A_log", "dt_bias")):
        # states last for some twenty tokens, or for hundreds
        scaled = -3.0 + noise if name.endswith("dt_bias") else 0.5 * noise
    elif name.endswith("bias"):
        scaled = (0.1 if variant.startswith(("gpt2", "opt")) else 0.3) * noise
    elif "norm" in name or ".ln_" in name:
        adds_one = (
            variant in ("gemma", "gemma3") or variant.startswith(ADD_ONE)
        ) and "linear_attn" not in name
        scaled = (0.0 if adds_one else 1.0) + 0.3 * noise
    elif name.endswith(("_min", "_max")):  # bounds of an encoder's products, which some numbers exceed
        scaled = (-2.0 if name.endswith("min") else 2.0) + 0.3 * noise
    elif name.endswith(("scale", "scalar")):
        scaled = 1.0 + 0.3 * noise
    elif any(table in name for table in ("embed_", "embeddings", "lm_head", "wte", "wpe")):
        scaled = next((scale for family, scale in TABLES.items() if variant.startswith(family)), 0.5) * noise
    else:
        stacked = (
            ".experts." in name
            and len(shape) == 3
            and variant.startswith(("gpt_oss", "llama4", "qwen3_vl_moe"))
        )  # [experts, in, out], as GPT-2's are [in, out]
        inputs = (
            shape[0]
            if ".c_" in name
            else math.prod(shape[1:])  # of an image's patches
            if len(shape) > 3
            else shape[1]
            if stacked
            else shape[-1]
        )
        scaled = 1.3 / math.sqrt(inputs) * noise
    if ties and not EACH_EXPERT.search(name) and any(part in name for part in OF_EXPERTS):
        scaled[1::2] = scaled[::2]
    return np.asarray(scaled, np.float32)


def uniform(key: str, count: int) -> np.ndarray:
    """float64[count] of mean 0 and variance 1, evenly distributed, given by the key."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    bits = np.random.PCG64(seed).random_raw(count) >> np.uint64(11)
    return (bits.astype(np.float64) * 2.0**-53 - 0.5) * math.sqrt(12.0)


def write_model(folder: Path, variant: str, **changes: Any) -> None:
    """A folder in Hugging Face's layout, without a tokenizer. changes: to the variant's config.json."""
    from safetensors.numpy import save_file

    config = {**VARIANTS[variant], **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights(variant, config), folder / "model.safetensors", metadata={"format": "pt"})


class Case(NamedTuple):
    """A prompt, and transformers' results for it."""

    prompt: np.ndarray  # int32[length]
    tokens: np.ndarray  # int32[24], the greedy continuation
    logits: np.ndarray  # float32[24, vocab], from which each of them was chosen
    everywhere: np.ndarray | None  # float32[length, vocab], at every position of the prompt, for some prompts


class Golden(NamedTuple):
    """A variant's recorded file."""

    config: dict[str, Any]
    cases: list[Case]
    smallest_margin: float  # between the two best tokens, over all greedy choices

    @classmethod
    def read(cls, variant: str) -> Golden:
        with np.load(Path(__file__).parent / f"{variant}.npz") as file:
            arrays = dict(file)
        kinds = ("prompt", "tokens", "logits", "everywhere")
        cases = [Case(*(arrays.get(f"{kind}_{i}") for kind in kinds)) for i in range(len(arrays["lengths"]))]  # type: ignore[arg-type]
        return cls(json.loads(str(arrays["config"])), cases, float(arrays["smallest_margin"]))
