"""Gemma: scaled embeddings. Gemma 2 and 3: norms before and after attention and MLP, soft caps, sliding
windows in most layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.config_parts import OutputHead
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import (
    attention_biases,
    decoder,
    full_attention_every,
    rope_by_layer_types,
    windows_by_layer_types,
)
from jengine.models.layers import Layer, RMSNorm
from jengine.models.llama import Llama
from jengine.models.qwen3 import Qwen3Attention
from jengine.models.residuals import SandwichLayer


class Gemma2(Llama):
    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        def norm(place: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype, f"{name}.{place}_layernorm")

        return SandwichLayer(
            norm("input"),
            self.attention(config, dtype, f"{name}.self_attn"),
            norm("post_attention"),
            norm("pre_feedforward"),
            self.mlp(config, dtype, name, index),
            norm("post_feedforward"),
        )


class Gemma3(Gemma2):
    attention = Qwen3Attention


HEADS = {"head_dim": 256, "tie_word_embeddings": True}
DEFAULTS = {
    **HEADS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2_DEFAULTS = {
    **DEFAULTS,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS = {**DEFAULTS, "max_position_embeddings": 131072}
IMAGES_DEFAULTS = {
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}


def _shared(hf: Fields, rope_parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        **decoder(hf, rope_parameters),
        **attention_biases(hf),
        "embedding_multiplier": float(hf["hidden_size"]) ** 0.5,
        "norm_offset": 1.0,
    }


def _capped(hf: Fields) -> dict[str, Any]:
    return {
        "activation": hf["hidden_activation"],
        "attention_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "head": OutputHead(soft_cap=hf.get("final_logit_softcapping")),
    }


def read_gemma(hf: Fields) -> dict[str, Any]:
    activation = hf.get("hidden_activation") or hf.get("hidden_act", "gelu")
    # The first checkpoints specify gelu but were trained with its approximation.
    return {**_shared(hf), "activation": "gelu_pytorch_tanh" if activation == "gelu" else activation}


def read_gemma2(hf: Fields) -> dict[str, Any]:
    windows = windows_by_layer_types(
        hf, hf["sliding_window"], full_attention_every(int(hf["num_hidden_layers"]), 2)
    )
    return {**_shared(hf), **_capped(hf), **windows, "attention_soft_cap": hf.get("attn_logit_softcapping")}


def read_gemma3(hf: Fields) -> dict[str, Any]:
    pattern = int(hf.get("sliding_window_pattern") or 6)
    windows = windows_by_layer_types(
        hf, hf["sliding_window"], full_attention_every(int(hf["num_hidden_layers"]), pattern)
    )
    everywhere, local_theta = rope_by_layer_types(
        hf, theta=1e6, local_theta=hf.get("rope_local_base_freq") or 10000.0
    )
    fields = _shared(hf, everywhere)
    return {**fields, **_capped(hf), **windows, "rope": replace(fields["rope"], local_theta=local_theta)}


FAMILIES = {
    "gemma": Family("Gemma", Llama, read_gemma, {**HEADS, "max_position_embeddings": 8192}),
    "gemma2": Family("Gemma 2", Gemma2, read_gemma2, GEMMA2_DEFAULTS),
    "gemma3": Family(
        "Gemma 3 with images",
        Gemma3,
        read_gemma3,
        IMAGES_DEFAULTS,
        TextPart(("gemma3_text",), tied=True),
    ),
    "gemma3_text": Family("Gemma 3 (text)", Gemma3, read_gemma3, GEMMA3_DEFAULTS),
}
