"""Llama 4: some layers do not rotate, the others attend within chunks. Each token uses one expert and a
shared one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields, TextPart
from jengine.models.glm import GlmAttention
from jengine.models.hf_config import attention_biases, decoder
from jengine.models.layers import Attend, Mixer, dense, unit
from jengine.models.llama import Llama
from jengine.models.mistral import scaled_queries
from jengine.models.moe import Experts, MixtureOfExperts
from pallas_kernels.cache.qkv import Qkv, QkvProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrotatedQueryScaling:
    """In layers that do not rotate, a query at position p is multiplied by 1 + beta * log(1 + (p + 1) //
    step).
    """

    beta: float
    step: int


class NormedAttention(GlmAttention):
    """Attention with norms without weights, before the rotation, which does not change a head's norm."""

    def normalize(self, qkv: QkvProduct) -> Qkv:
        q, k, v = qkv.split()
        return Qkv(unit(q, self.config.norm_eps), unit(k, self.config.norm_eps), v)


class Llama4Experts(Experts):
    """The chosen expert's score multiplies its input. Checkpoints store all experts in one tensor, [experts,
    in, out].
    """

    router_name, shared_name = "router", "shared_expert"
    stacked = "experts.gate_up_proj", "experts.down_proj"
    transposed = True

    def scores(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The highest score, float32 [N, 1], and its expert."""
        return lax.top_k(dense(x, self.router[...], dtype=jnp.float32), 1)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        score, chosen = self.scores(x)
        return jnp.ones_like(score), chosen

    def entering(self, x: jax.Array) -> jax.Array:
        return x * jax.nn.sigmoid(self.scores(x)[0]).astype(x.dtype)


class Llama4(Llama):
    mlp_name, experts = "feed_forward", Llama4Experts

    def mixer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Mixer:
        normed = config.qk_norm and index not in config.rope.unrotated
        return (NormedAttention if normed else GlmAttention)(config, dtype, f"{name}.self_attn")

    def attending(self, positions: jax.Array, attend: Attend) -> Attend:
        config = self.config
        scaling = config.find(UnrotatedQueryScaling)
        if scaling is None:
            return attend
        scales = 1 + scaling.beta * jnp.log1p((positions + 1) // scaling.step)
        return scaled_queries(attend, scales, config.rope.unrotated)


def read_llama4(hf: Fields) -> dict[str, Any]:
    """Limits sequences to one chunk, in which all layers see all earlier tokens.

    Raises:
        ModelError: a token uses several experts, or layer_types contradicts no_rope_layers.
    """
    fields, chosen = {**decoder(hf), **attention_biases(hf)}, int(hf["num_experts_per_tok"])
    layers = fields["num_layers"]
    every = int(hf["no_rope_layer_interval"])
    step = int(hf["interleave_moe_layer_step"])
    if chosen != 1:
        raise ModelError(f"num_experts_per_tok={chosen} is not supported; 1 is")
    rotated = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    types = ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    if (hf.get("layer_types") or types) != types:
        raise ModelError(
            "layer_types must be chunked_attention for layers with rotary embedding and full_attention for"
            " the others"
        )
    sparse = hf.get("moe_layers")
    experts = MixtureOfExperts(
        layers=tuple(range(step - 1, layers, step) if sparse is None else sparse),
        count=int(hf["num_local_experts"]),
        per_token=chosen,
        size=int(hf["intermediate_size"]),
        shared_size=int(hf["intermediate_size"]),
    )
    scaling = UnrotatedQueryScaling(
        beta=float(hf["attn_scale"]) * bool(hf["attn_temperature_tuning"]), step=int(hf["floor_scale"])
    )
    return {
        **fields,
        "intermediate_size": int(hf["intermediate_size_mlp"]),
        "max_position": min(
            fields["max_position"], int(hf.get("attention_chunk_size") or fields["max_position"])
        ),
        "rope": dataclasses.replace(
            fields["rope"], unrotated=tuple(i for i, rotates in enumerate(rotated) if not rotates)
        ),
        "qk_norm": bool(hf["use_qk_norm"]),
        "parts": (experts, scaling) if scaling.beta else (experts,),
    }


DEFAULTS = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_experts_per_tok": 1,
    "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
PARTS = (MixtureOfExperts, UnrotatedQueryScaling)
TEXT = TextPart(("llama4_text",), ("vision_model.", "multi_modal_projector."), tied=None)
FAMILIES = {
    "llama4": Family(
        "Llama 4 with images (its text model)", Llama4, read_llama4, text_part=TEXT, parts=PARTS
    ),
    "llama4_text": Family("Llama 4 (text)", Llama4, read_llama4, DEFAULTS, parts=PARTS),
}
