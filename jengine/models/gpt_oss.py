"""gpt-oss: attention sinks, a sliding window in every second layer, and experts with biases and clamped
gates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, windows_by_layer_types
from jengine.models.layers import Attention, dense, param
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts, experts_everywhere
from jengine.models.pieces import EVERY, Piece, heads, qkv_parts
from pallas_kernels.attention.options import AttentionOptions

GROUP = 32  # inputs per scale in MXFP4; each device has whole groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGates:
    """Experts compute gate * sigmoid(alpha * gate) * (up + 1), with gate at most limit, and up within plus
    and minus it.
    """

    alpha: float
    limit: float


class GptOssAttention(Attention):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().__init__(config, dtype, name)
        places = heads(qkv_parts(config)[0], config.head_dim)
        source = (
            Piece(f"{name}.sinks", (config.num_heads,), (laid, slice(at, at + 1)), slice(head, head + 1))
            for head, laid, at in ((head, laid, row // config.head_dim) for head, laid, row in places)
        )
        self.sinks = param(
            (config.num_kv_heads_padded, config.group_size_padded), jnp.float32, ("kv_heads", None), *source
        )

    def options(self, layer: int) -> AttentionOptions:
        return replace(super().options(layer), sinks=self.sinks[...].reshape(-1))


class GptOssExperts(Experts):
    """Experts that checkpoints store in one tensor per layer, [experts, in, out] or in MXFP4. Gate and up
    alternate.
    """

    router_name, stacked, transposed = "router", ("experts.gate_up_proj", "experts.down_proj"), True

    @property
    def group(self) -> int:
        return 1 if self.config.stored is None else GROUP

    def sources(self, name: str) -> tuple[list[Piece], list[Piece]]:
        [half, _], down = super().sources(name)
        return [half._replace(part=half.part[:2], rows=EVERY)], down

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        experts, ffn, hidden = self.sizes.count, self.sizes.size, self.config.hidden_size
        (laid, size), every = self.laid, self.real
        self.router_bias = param((experts,), dtype, (None,), Piece(f"{name}.router.bias", (experts,)))
        gate_bias = Piece(f"{name}.experts.gate_up_proj_bias", (experts, 2 * ffn), (every, slice(0, ffn)))
        self.gate_up_bias = param((laid, size, 2), dtype, ("experts", "ffn", None), gate_bias)
        down_bias = Piece(f"{name}.experts.down_proj_bias", (experts, hidden), (every,))
        self.down_bias = param((laid, hidden), dtype, ("experts", None), down_bias)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = dense(x, self.router[...], self.router_bias[...], jnp.float32)
        highest, chosen = lax.top_k(scores, self.sizes.per_token)
        return jax.nn.softmax(highest), chosen

    def gate(self, gate_up: jax.Array) -> jax.Array:
        wide, clamped = gate_up.astype(jnp.float32), self.config.part(ClampedGates)
        gate = jnp.minimum(wide[..., 0], clamped.limit)
        up = jnp.clip(wide[..., 1], -clamped.limit, clamped.limit)
        return ((up + 1) * gate * jax.nn.sigmoid(gate * clamped.alpha)).astype(gate_up.dtype)


class GptOss(Llama):
    attention, experts = GptOssAttention, GptOssExperts


def read_gpt_oss(hf: Fields) -> dict[str, Any]:
    layers = int(hf["num_hidden_layers"])
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    fields = {
        **decoder(hf),
        **attention_biases(hf),
        **windows_by_layer_types(hf, hf["sliding_window"], types),
    }
    experts = experts_everywhere(
        fields,
        hf.get("num_local_experts") or hf.get("num_experts", 128),
        hf.get("num_experts_per_tok") or hf.get("experts_per_token", 4),
    )
    return {
        **fields,
        "parts": (experts, ClampedGates(alpha=float(hf["swiglu_alpha"]), limit=float(hf["swiglu_limit"]))),
    }


DEFAULTS = {
    "attention_bias": True, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",  # OpenAI's files name no dtype
}  # fmt: skip
FAMILIES = {
    "gpt_oss": Family("gpt-oss", GptOss, read_gpt_oss, DEFAULTS, parts=(MixtureOfExperts, ClampedGates))
}
