"""OLMo 2 and 3, EXAONE 4: the results of attention and MLP are normed, not their inputs. OLMo and OLMoE norm
queries and keys over all heads together, EXAONE per head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import (
    attention_biases,
    decoder,
    rope_by_layer_types,
    rotated_in_windows,
    windows_but_every,
)
from jengine.models.layers import Attention, param
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts, experts_everywhere
from jengine.models.pieces import apart, qkv_parts
from jengine.models.qwen import Qwen3Attention
from jengine.models.residuals import ResultNormLayer
from jengine.parallel.collectives import all_reduce
from pallas_kernels.cache.qkv import Qkv, QkvProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedQkv:
    """The largest absolute value of queries, keys and values."""

    limit: float


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


class OlmoeAttention(OlmoAttention):
    def normalize(self, qkv: QkvProduct) -> Qkv:
        normed, clipped = super().normalize(qkv), self.config.find(ClippedQkv)
        return (
            normed if clipped is None else Qkv(*(jnp.clip(x, -clipped.limit, clipped.limit) for x in normed))
        )


class Olmo(Llama):
    attention: type[Attention] = OlmoAttention
    layer_type = ResultNormLayer
    norm_names = "post_attention_layernorm", "post_feedforward_layernorm"


class Exaone4(Olmo):
    attention = Qwen3Attention


class Olmoe(Llama):
    attention = OlmoeAttention


def read_olmo2(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **attention_biases(hf)}


def read_olmo3(hf: Fields) -> dict[str, Any]:
    windows = windows_but_every(hf, hf["sliding_window"], 4)
    everywhere, local_theta = rope_by_layer_types(hf, theta=float(hf["rope_theta"]))
    fields = decoder(hf, everywhere)
    return {
        **fields,
        **attention_biases(hf),
        **windows,
        "rope": replace(fields["rope"], local_theta=local_theta),
    }


def read_olmoe(hf: Fields) -> dict[str, Any]:
    fields, limit = decoder(hf), hf.get("clip_qkv")
    experts = experts_everywhere(
        fields,
        hf.get("num_experts", 64),
        hf.get("num_experts_per_tok", 8),
        normalize=bool(hf.get("norm_topk_prob", False)),
    )
    clipped = () if limit is None else (ClippedQkv(limit=float(limit)),)
    return {**fields, **attention_biases(hf), "parts": (experts, *clipped)}


def read_exaone4(hf: Fields) -> dict[str, Any]:
    """If some layers have a window, the others do not rotate."""
    fields, window, pattern = decoder(hf), hf.get("sliding_window"), hf.get("sliding_window_pattern") or 4
    # LLLG means every fourth layer
    every = len(pattern) if isinstance(pattern, str) else int(pattern)
    if window is None:
        return fields
    return rotated_in_windows(fields, windows_but_every(hf, window, every))


EXAONE4 = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
OLMOE = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
OLMO3 = {**EXAONE4, "rope_theta": 5e5}
FAMILIES = {
    "exaone4": Family("EXAONE 4", Exaone4, read_exaone4, EXAONE4),
    "olmo2": Family("OLMo 2", Olmo, read_olmo2, {"rms_norm_eps": 1e-5}),
    "olmo3": Family("OLMo 3", Olmo, read_olmo3, OLMO3),
    "olmoe": Family("OLMoE", Olmoe, read_olmoe, OLMOE, parts=(MixtureOfExperts, ClippedQkv)),
}
