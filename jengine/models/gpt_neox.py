"""GPT-NeoX and Pythia: LayerNorm; queries, keys and values fused by head; partial rotation; parallel
attention and MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import partly_rotated, rope_fields
from jengine.models.layers import Attention, Layer, LayerNorm, Mlp
from jengine.models.llama import Llama
from jengine.models.pieces import Part, Piece, grouped
from jengine.models.residuals import ParallelLayer, ParallelResidual


class GptNeoXAttention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return grouped(f"{name}.query_key_value.{kind}", self.config, parts, *inputs)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.dense.{kind}", shape)


class GptNeoX(Llama):
    prefix = "gpt_neox."
    embed_name, layers_name, norm_name, head_name = "embed_in", "layers", "final_layer_norm", "embed_out"
    norm_type = LayerNorm

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return (ParallelLayer if config.find(ParallelResidual) else Layer)(
            LayerNorm(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            GptNeoXAttention(config, dtype, f"{name}.attention"),
            LayerNorm(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            Mlp(config, dtype, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"),
        )


def read_gpt_neox(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", True))
    rope = {"rope_theta": hf.get("rotary_emb_base"), **rope_fields(hf)}
    return {
        **partly_rotated(hf, float(hf.get("rotary_pct", 0.25)), rope),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "parts": (ParallelResidual(shared_norm=False),) if hf.get("use_parallel_residual", True) else (),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
    }


FAMILIES = {
    "gpt_neox": Family(
        "GPT-NeoX, Pythia", GptNeoX, read_gpt_neox, {"hidden_act": "gelu"}, parts=(ParallelResidual,)
    )
}
