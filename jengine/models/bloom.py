"""BLOOM: ALiBi (Press et al., 2022) instead of position embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.models.config import ModelConfig
from jengine.models.config_parts import Rotary
from jengine.models.family import Family, Fields
from jengine.models.gpt_neox import GptNeoXAttention
from jengine.models.layers import Attend, Layer, LayerNorm, Mlp
from jengine.models.llama import Llama
from jengine.parallel.collectives import shard_index
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation


class BloomAttention(GptNeoXAttention):
    slopes = True


class Bloom(Llama):
    prefix = "transformer."
    entry: tuple[str, ...] = ("embed", "embedding_norm")
    embed_name, layers_name, norm_name = "word_embeddings", "h", "ln_f"
    norm_type = LayerNorm

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        self.embedding_norm = LayerNorm(
            config.hidden_size, config, dtype, f"{self.prefix}word_embeddings_layernorm"
        )

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return Layer(
            LayerNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            BloomAttention(config, dtype, f"{name}.self_attention"),
            LayerNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            Mlp(config, dtype, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"),
        )

    def embedded(self, tokens: jax.Array) -> jax.Array:
        return self.embedding_norm(super().embedded(tokens))

    def attending(self, positions: jax.Array, attend: Attend) -> Attend:
        every, heads = (
            jnp.asarray(laid_slopes(self.config)),
            self.config.num_kv_heads_padded // self.config.shards,
        )
        slopes_here = lax.dynamic_slice_in_dim(every, shard_index() * heads, heads)

        def with_slopes(
            layer: int,
            qkv: Qkv | QkvProduct | QueriesOnly,
            rotation: Rotation | None,
            options: AttentionOptions,
        ) -> jax.Array:
            return attend(layer, qkv, rotation, replace(options, slopes=slopes_here))

        return with_slopes


def laid_slopes(config: ModelConfig) -> np.ndarray:
    """Slopes of the heads of all devices, float32 [num_kv_heads_padded]; 0 for padding."""
    known = np.repeat(np.array(slopes(config.num_heads), np.float32), config.kv_repeats)
    return np.pad(known, (0, config.num_kv_heads_padded - len(known)))


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes.

    For a power of two, they are a geometric sequence. Other numbers of heads continue with every second
    element of the sequence for the next power of two.
    """
    whole = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return first + [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


def read_bloom(hf: Fields) -> dict[str, Any]:
    hidden, heads = (
        int(hf.get("n_embed") or hf["hidden_size"]),
        int(hf.get("n_head") or hf["num_attention_heads"]),
    )
    layers = int(hf.get("n_layer") or hf["num_hidden_layers"])
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "rope": Rotary(unrotated=tuple(range(layers))),
        "max_position": int(hf.get("seq_length", 2048)),
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "activation": "gelu_new",
        "tie_embeddings": bool(hf.get("tie_word_embeddings", True)),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
    }


FAMILIES = {"bloom": Family("BLOOM, BLOOMZ", Bloom, read_bloom)}
