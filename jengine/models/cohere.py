"""Cohere's Command R and R+, Aya (cohere), Command R7B and A (cohere2): parallel attention and MLP with one
norm without a bias.

Adjacent channels rotate together. In cohere2, layers without a window do not rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.config_parts import OutputHead
from jengine.models.family import Family, Fields
from jengine.models.glm import GlmAttention
from jengine.models.hf_config import attention_biases, decoder, full_attention_every, windows_by_layer_types
from jengine.models.layers import Layer, LayerNorm
from jengine.models.llama import Llama
from jengine.models.pieces import Piece, heads, qkv_parts
from jengine.models.residuals import ParallelLayer
from jengine.models.stablelm import HeadLayerNorms


class CohereAttention(GlmAttention, HeadLayerNorms):
    """With qk_norm, queries and keys are normed per head. Their weights are in the order in which channels
    rotate.
    """

    def qk_norm_source(self, name: str) -> tuple[Piece, ...]:
        config, pieces = self.config, list[Piece]()
        dim, half = config.head_dim, config.head_dim // 2
        for kind, count, part in zip(
            "qk", (config.num_heads, config.num_kv_heads), qkv_parts(config)[:2], strict=True
        ):
            for head, laid, row in heads(part, dim):
                for i, start in enumerate((row, row + half)):  # even channels, then odd ones
                    rows = slice(head, head + 1), slice(i, dim, 2)
                    pieces.append(
                        Piece(
                            f"{name}.{kind}_norm.weight",
                            (count, dim),
                            (laid, slice(start, start + half)),
                            rows,
                        )
                    )
        return tuple(pieces)


class CohereNorm(LayerNorm):
    biased = False


class Cohere(Llama):
    norm_type = CohereNorm

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        norm = CohereNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm")
        return ParallelLayer(
            norm,
            CohereAttention(config, dtype, f"{name}.self_attn"),
            norm,
            self.mlp(config, dtype, name, index),
        )


def read_cohere(hf: Fields) -> dict[str, Any]:
    scale = float(hf["logit_scale"])
    if scale <= 0:
        raise ModelError(f"logit_scale={scale} must be above 0")
    return {
        **decoder(hf),
        **attention_biases(hf),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "head": OutputHead(divisor=1 / scale),
        "qk_norm": bool(hf.get("use_qk_norm", False)),
    }


def read_cohere2(hf: Fields) -> dict[str, Any]:
    if hf.get("use_qk_norm"):
        raise ModelError("use_qk_norm=true is not supported; false is")
    layers, pattern = int(hf["num_hidden_layers"]), int(hf.get("sliding_window_pattern") or 4)
    windows = windows_by_layer_types(hf, int(hf["sliding_window"]), full_attention_every(layers, pattern))
    seen = windows.get("windows", (None,) * layers)
    fields = read_cohere(hf)
    unrotated = tuple(i for i in range(layers) if seen[i] is None)
    return {**fields, **windows, "rope": replace(fields["rope"], unrotated=unrotated)}


DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "tie_word_embeddings": True}
FAMILIES = {
    "cohere": Family("Command R, R+, Aya (Cohere)", Cohere, read_cohere, {**DEFAULTS, "rope_theta": 5e5}),
    "cohere2": Family(
        "Command R7B, Command A (Cohere 2)", Cohere, read_cohere2, {**DEFAULTS, "sliding_window": 4096}
    ),
}
