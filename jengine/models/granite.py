"""Granite 3, with experts too: factors for embeddings, scores, logits and the layers' contributions to the
residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jengine.models.config import ModelConfig, OutputHead
from jengine.models.family import Family, Fields
from jengine.models.layers import Attend, Layer, Stream
from jengine.models.llama import Llama, read_llama
from jengine.models.moe import Experts, MixtureOfExperts, experts_everywhere
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import array_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualMultiplier:
    """A factor of what attention and MLP add to the residual stream."""

    factor: float


class GraniteLayer(Layer):
    multiplier: float

    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = array_of(x)
        x = x + self.attention(layer, self.attention_norm(x), rotation, attend) * self.multiplier
        return x + self.mlp(self.mlp_norm(x)) * self.multiplier


class Granite(Llama):
    layer_type = GraniteLayer

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        layer = super().layer(config, dtype, name, index)
        assert isinstance(layer, GraniteLayer)
        layer.multiplier = config.part(ResidualMultiplier).factor
        return layer


class GraniteExperts(Experts):
    router_name, stacked = "router.layer", ("input_linear.weight", "output_linear.weight")


class GraniteMoe(Granite):
    mlp_name, experts = "block_sparse_moe", GraniteExperts


def read_granite(hf: Fields) -> dict[str, Any]:
    return {
        **read_llama(hf),
        "attention_scale": float(hf.get("attention_multiplier", 1.0)),
        "embedding_multiplier": float(hf.get("embedding_multiplier", 1.0)),
        "head": OutputHead(divisor=float(hf.get("logits_scaling", 1.0))),
        "parts": (ResidualMultiplier(factor=float(hf.get("residual_multiplier", 1.0))),),
    }


def read_granite_moe(hf: Fields) -> dict[str, Any]:
    fields = read_granite(hf)
    experts = experts_everywhere(fields, hf.get("num_local_experts", 8), hf.get("num_experts_per_tok", 2))
    return {**fields, "parts": (*fields["parts"], experts)}


PARTS = (ResidualMultiplier, MixtureOfExperts)
FAMILIES = {
    "granite": Family("Granite 3 (dense)", Granite, read_granite, parts=(ResidualMultiplier,)),
    "granitemoe": Family("Granite 3 with experts", GraniteMoe, read_granite_moe, parts=PARTS),
}
