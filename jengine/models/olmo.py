"""OLMo 2 and 3: the results of attention and MLP are normed, not their inputs, and so are queries and keys,
over all heads together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import (
    attention_biases,
    decoder,
    full_attention_every,
    rope_by_layer_types,
    windows_by_layer_types,
)
from jengine.models.layers import Attention, Layer, RMSNorm, param
from jengine.models.llama import Llama
from jengine.models.pieces import apart, qkv_parts
from jengine.models.residuals import ResultNormLayer
from jengine.parallel.collectives import all_reduce
from pallas_kernels.cache.qkv import Qkv, QkvProduct


class OlmoAttention(Attention):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().__init__(config, dtype, name)
        source = apart([f"{name}.{kind}_norm.weight" for kind in "qk"], qkv_parts(config)[:2])
        shape = (config.num_kv_heads_padded, (config.group_size_padded + 1) * config.head_dim)
        self.qk_norm = param(shape, dtype, ("kv_heads", None), *source)

    def normalize(self, qkv: QkvProduct) -> Qkv:
        """Each is a root mean square norm over all heads, which lie on several devices. Padding is zero;
        copies of kv heads count as often as they are there.
        """
        q, k, v = qkv.split()
        config, weight = self.config, self.qk_norm[...].astype(jnp.float32)
        wide = [x.astype(jnp.float32) for x in (q, k)]
        counts = (
            jnp.array([config.num_heads, config.num_kv_heads * config.kv_repeats], jnp.float32)
            * config.head_dim
        )
        squares = jnp.stack([jnp.sum(x * x, axis=(1, 2)) for x in wide], axis=-1)  # [N, 2]
        factors = lax.rsqrt(all_reduce(squares) / counts + config.norm_eps)
        ends = config.group_size_padded * config.head_dim
        weights = weight[:, :ends], weight[:, ends:]
        normed = (x * factors[:, i, None, None] * weights[i].reshape(x.shape[1:]) for i, x in enumerate(wide))
        q_normed, k_normed = (y.astype(q.dtype) for y in normed)
        return Qkv(q_normed, k_normed, v)


class Olmo(Llama):
    attention: type[Attention] = OlmoAttention

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return ResultNormLayer(
            RMSNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            self.attention(config, dtype, f"{name}.self_attn"),
            RMSNorm(config.hidden_size, config, dtype, f"{name}.post_feedforward_layernorm"),
            self.mlp(config, dtype, name, index),
        )


def read_olmo2(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **attention_biases(hf)}


def read_olmo3(hf: Fields) -> dict[str, Any]:
    windows = windows_by_layer_types(
        hf, hf["sliding_window"], full_attention_every(int(hf["num_hidden_layers"]), 4)
    )
    theta = float(hf["rope_theta"])
    everywhere, local_theta = rope_by_layer_types(hf, theta, theta)
    fields = decoder(hf, everywhere)
    return {
        **fields,
        **attention_biases(hf),
        **windows,
        "rope": replace(fields["rope"], local_theta=local_theta),
    }


FAMILIES = {
    "olmo2": Family("OLMo 2", Olmo, read_olmo2, {"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        "OLMo 3", Olmo, read_olmo3, {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}
    ),
}
