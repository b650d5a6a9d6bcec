"""Falcon: queries, keys and values fused by kv head; parallel attention and MLP with one norm (7B, 11B) or
two (40B, 180B).
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.gpt_neox import GptNeoXAttention
from jengine.models.hf_config import rope, rope_fields
from jengine.models.layers import Layer, LayerNorm, Mlp
from jengine.models.llama import Llama
from jengine.models.residuals import ParallelLayer, ParallelResidual


class Falcon(Llama):
    prefix = "transformer."
    embed_name, layers_name, norm_name = "word_embeddings", "h", "ln_f"
    norm_type = LayerNorm

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        def norm(place: str) -> LayerNorm:
            return LayerNorm(config.hidden_size, config, dtype, f"{name}.{place}")

        attention = GptNeoXAttention(config, dtype, f"{name}.self_attention")
        mlp = Mlp(config, dtype, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h")
        parallel = config.find(ParallelResidual)
        if parallel is None:
            return Layer(norm("input_layernorm"), attention, norm("post_attention_layernorm"), mlp)
        if not parallel.shared_norm:
            return ParallelLayer(norm("ln_attn"), attention, norm("ln_mlp"), mlp)
        shared = norm("input_layernorm")
        return ParallelLayer(shared, attention, shared, mlp)


def read_falcon(hf: Fields) -> dict[str, Any]:
    if hf.get("alibi"):
        raise ModelError("alibi is not supported; rotary embedding is")
    heads, hidden = int(hf["num_attention_heads"]), int(hf["hidden_size"])
    new = bool(hf.get("new_decoder_architecture", False))
    grouped, multi_query = int(hf.get("num_kv_heads") or heads), bool(hf.get("multi_query", True))
    kv_heads = grouped if new else 1 if multi_query else heads
    parallel, norms = (
        bool(hf.get("parallel_attn", True)),
        int(hf.get("num_ln_in_parallel_attn") or 2) if new else 1,
    )
    if new and not parallel:
        raise ModelError("parallel_attn=False is not supported with new_decoder_architecture")
    bias = bool(hf.get("bias", False))
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(hf.get("ffn_hidden_size") or 4 * hidden),
        "num_layers": int(hf["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position": int(hf.get("max_position_embeddings", 2048)),
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "parts": (ParallelResidual(shared_norm=norms == 1),) if parallel else (),
        "activation": hf.get("activation", "gelu"),
        "tie_embeddings": bool(hf["tie_word_embeddings"]),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bias),
        "rope": rope(hf, rope_fields(hf)),
    }


FAMILIES = {
    "falcon": Family("Falcon", Falcon, read_falcon, {"tie_word_embeddings": True}, parts=(ParallelResidual,))
}
