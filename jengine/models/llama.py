"""Llama 2, 3 and 3.1+; Mistral and Qwen2 are Llamas of other configurations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, window_everywhere, windows_by_layer_types
from jengine.models.layers import Attend, Attention, Block, GatedMlp, Layer, RMSNorm, dense, embed, vocabulary
from jengine.models.rope import rope


class Llama(nnx.Module):
    """A decoder-only transformer as a function of arrays, on one flat token axis.

    A family that differs inside attention only names its own class of it; others override `mlp` or `layer`.
    """

    prefix = "model."
    attention: type[Attention] = Attention

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        self.rope = rope(config, max_model_len)
        self.embed = vocabulary(config, config.hidden_size, dtype, "model.embed_tokens.weight")
        self.layers = nnx.List([self.layer(config, dtype, f"model.layers.{i}", i) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config, dtype, "model.norm")
        self.lm_head = None if config.tie_embeddings else vocabulary(config, config.hidden_size, dtype, "lm_head.weight")

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return Layer(
            RMSNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            self.attention(config, dtype, f"{name}.self_attn"),
            RMSNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            self.mlp(config, dtype, name, index),
        )

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return GatedMlp(config, dtype, f"{name}.mlp")

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """tokens and positions int32[N] -> [N, hidden], after the final norm."""
        x = embed(self.embed[...], tokens)
        rotation = self.rope.cos_sin(positions)
        for i, layer in enumerate(self.layers):
            x = layer(i, x, rotation, attend)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, hidden] -> float32[N, vocab]."""
        return dense(hidden, (self.embed if self.lm_head is None else self.lm_head)[...], dtype=jnp.float32)


def read_llama(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **attention_biases(hf), "mlp_bias": bool(hf.get("mlp_bias", False))}


def read_mistral(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **window_everywhere(hf, hf.get("sliding_window"))}


def qwen_windows(hf: Fields) -> dict[str, Any]:
    layers, first = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    window = hf.get("sliding_window", 4096)  # present in many configurations that do not use it
    types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return windows_by_layer_types(hf, window if hf.get("use_sliding_window") else None, types)


def read_qwen2(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **qwen_windows(hf), "qkv_bias": True}


FAMILIES = {
    "llama": Family("Llama 2, 3, 3.1 and later", Llama, read_llama),
    "mistral": Family("Mistral", Llama, read_mistral, {"max_position_embeddings": 131072, "sliding_window": 4096}),
    "qwen2": Family("Qwen2, Qwen2.5", Llama, read_qwen2),
}
