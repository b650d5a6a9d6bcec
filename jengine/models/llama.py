"""Llama 2, 3 and 3.1+, and what is built like them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.config import ModelConfig
from jengine.models.layers import Attend, Attention, GatedMlp, Piece, RMSNorm, dense, param
from jengine.models.rope import rope


class LlamaLayer(nnx.Module):
    """Attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, attention: type[Attention]) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm")
        self.attention = attention(config, dtype, f"{name}.self_attn")
        self.mlp_norm = RMSNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm")
        self.mlp = GatedMlp(config, dtype, f"{name}.mlp")

    def __call__(self, layer: int, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend) -> jax.Array:
        x = x + self.attention(layer, self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """A decoder-only transformer as a function of arrays, on one flat token axis.

    A family that differs only inside attention names its own `attention` class.
    """

    attention: type[Attention] = Attention

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        table, axes = (config.vocab_size, config.hidden_size), ("vocab", None)
        self.rope = rope(config, max_model_len)
        self.embed = param(table, dtype, axes, Piece("model.embed_tokens.weight", table))
        names = (f"model.layers.{i}" for i in range(config.num_layers))
        self.layers = nnx.List([LlamaLayer(config, dtype, name, self.attention) for name in names])
        self.norm = RMSNorm(config.hidden_size, config, dtype, "model.norm")
        self.lm_head = None if config.tie_embeddings else param(table, dtype, axes, Piece("lm_head.weight", table))

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """tokens and positions int32[N] -> [N, hidden], after the final norm."""
        x = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
        cos, sin = self.rope.cos_sin(positions)
        for i, layer in enumerate(self.layers):
            x = layer(i, x, cos, sin, attend)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, hidden] -> float32[N, vocab]."""
        return dense(hidden, (self.embed if self.lm_head is None else self.lm_head)[...], dtype=jnp.float32)
