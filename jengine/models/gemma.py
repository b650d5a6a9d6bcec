"""Gemma 2 and 3 (text): norms on both sides of attention and MLP, soft caps, windows in most layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jengine.config import ModelConfig
from jengine.models.layers import Attend, Attention, Block, Layer, RMSNorm, embed
from jengine.models.llama import Llama
from jengine.models.qwen3 import Qwen3Attention
from jengine.models.rope import local_rope
from pallas_kernels.xla import Rotation


class GemmaLayer(Layer):
    """A layer whose attention and MLP have their results normed as well."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, attention: Attention, mlp: Block) -> None:
        def norm(place: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype, f"{name}.{place}_layernorm")

        super().__init__(norm("input"), attention, norm("pre_feedforward"), mlp)
        self.attention_result_norm, self.mlp_result_norm = norm("post_attention"), norm("post_feedforward")

    def __call__(self, layer: int, x: jax.Array, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = x + self.attention_result_norm(self.attention(layer, self.attention_norm(x), rotation, attend))
        return x + self.mlp_result_norm(self.mlp(self.mlp_norm(x)))


class Gemma2(Llama):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        self.config, self.local_rope = config, local_rope(config, max_model_len)

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        attention, mlp = self.attention(config, dtype, f"{name}.self_attn"), self.mlp(config, dtype, name, index)
        return GemmaLayer(config, dtype, name, attention, mlp)

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = embed(self.embed[...], tokens)
        x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        everywhere, nearby = self.rope.cos_sin(positions), self.local_rope.cos_sin(positions)
        for i, layer in enumerate(self.layers):
            x = layer(i, x, everywhere if self.config.window(i) is None else nearby, attend)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        logits, cap = super().logits(hidden), self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Gemma3(Gemma2):
    attention = Qwen3Attention
