"""Tiny random models: their configurations, weights and recorded results. Needs numpy only, and safetensors to write a folder.

A weight depends on its variant's name and its own, so no weights are stored; the generator's raw bits are
used, which numpy promises never to change.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
_QWEN3 = {
    **{name: value for name, value in _LLAMA.items() if name != "mlp_bias"},
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 24,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {**_LLAMA, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama_mha": {**_LLAMA, "num_key_value_heads": 4},
    "llama_gqa": {**_LLAMA, "num_attention_heads": 8},
    "llama_mqa": {**_LLAMA, "num_key_value_heads": 1, "vocab_size": 101},
    "llama_tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama_attention_bias": {**_LLAMA, "attention_bias": True},
    "llama_mlp_bias": {**_LLAMA, "mlp_bias": True},
    "llama_head_dim": {**_LLAMA, "head_dim": 24, "num_hidden_layers": 3},
    "rope_llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "rope_linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope_dynamic_inside": _DYNAMIC,
    "rope_dynamic_beyond": _DYNAMIC,
    "rope_yarn": {**_LLAMA, "rope_scaling": _YARN},
    "rope_yarn_mscale": {
        **_LLAMA,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    },
    "rope_yarn_attention_factor": {**_LLAMA, "rope_scaling": {**_YARN, "attention_factor": 0.9}},
    "qwen3_untied": _QWEN3,
    "qwen3_tied": {**_QWEN3, "tie_word_embeddings": True, "attention_bias": True},
}


def max_model_len(variant: str) -> int:
    """Tokens a sequence may have: every prompt and continuation fits. Beyond the trained context for rope_dynamic_beyond."""
    return 64 if variant == "rope_dynamic_inside" else 192


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Hugging Face checkpoint with this configuration."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv, table = heads * dim, config["num_key_value_heads"] * dim, (config["vocab_size"], hidden)
    projections = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in projections.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias"):
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    return shapes


def weights(variant: str) -> dict[str, np.ndarray]:
    """Every tensor in float32. Scales are such that attention is uneven and the best tokens stand clear."""
    return {name: _weight(f"{variant}/{name}", shape) for name, shape in tensor_shapes(VARIANTS[variant]).items()}


def _weight(key: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = uniform(key, math.prod(shape)).reshape(shape)
    if "norm" in key:
        scaled = 1.0 + 0.3 * noise
    elif key.endswith(".bias"):
        scaled = 0.3 * noise
    elif "embed_tokens" in key or "lm_head" in key:
        scaled = 0.5 * noise
    else:
        scaled = 1.3 / math.sqrt(shape[-1]) * noise
    return scaled.astype(np.float32)


def uniform(key: str, count: int) -> np.ndarray:
    """float64[count] of mean 0 and variance 1, evenly distributed, given by the key."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    bits = np.random.PCG64(seed).random_raw(count) >> np.uint64(11)
    return (bits.astype(np.float64) * 2.0**-53 - 0.5) * math.sqrt(12.0)


def write_model(folder: Path, variant: str) -> None:
    """A folder in Hugging Face's layout, without a tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(VARIANTS[variant], indent=2))
    save_file(weights(variant), folder / "model.safetensors", metadata={"format": "pt"})


class Case(NamedTuple):
    """A prompt and what transformers makes of it."""

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
