"""Gemma 2 and 3 (text): norms on both sides of attention and MLP, soft caps, windows in most layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jengine.config import ModelConfig
from jengine.errors import ModelError
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, full_attention_every, windows_by_layer_types
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


DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = {**DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3_DEFAULTS = {**DEFAULTS, "max_position_embeddings": 131072}


def _shared(hf: Fields, rope_parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        **decoder(hf, rope_parameters),
        **attention_biases(hf),
        "activation": hf["hidden_activation"],
        "attention_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "logit_soft_cap": hf.get("final_logit_softcapping"),
        "norm_offset": 1.0,
    }


def read_gemma2(hf: Fields) -> dict[str, Any]:
    windows = windows_by_layer_types(hf, hf["sliding_window"], full_attention_every(int(hf["num_hidden_layers"]), 2))
    return {**_shared(hf), **windows, "attention_soft_cap": hf.get("attn_logit_softcapping")}


def read_gemma3(hf: Fields) -> dict[str, Any]:
    pattern = int(hf.get("sliding_window_pattern") or 6)
    windows = windows_by_layer_types(hf, hf["sliding_window"], full_attention_every(int(hf["num_hidden_layers"]), pattern))
    ropes = hf.get("rope_parameters") or {}
    full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ModelError(f"rope scaling {local['rope_type']!r} of sliding_attention is not supported")
    everywhere = {"rope_theta": hf.get("rope_theta") or 1e6, **full, **(hf.get("rope_scaling") or {})}
    local_theta = local.get("rope_theta") or hf.get("rope_local_base_freq") or 10000.0
    return {**_shared(hf, everywhere), **windows, "local_rope_theta": float(local_theta)}


FAMILIES = {
    "gemma2": Family("Gemma 2", Gemma2, read_gemma2, GEMMA2_DEFAULTS),
    "gemma3_text": Family("Gemma 3 (text)", Gemma3, read_gemma3, GEMMA3_DEFAULTS),
}
