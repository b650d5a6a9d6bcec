"""GPT-J: parallel attention and MLP with one norm. Adjacent channels rotate together, only the first channels
of each head.
"""

from __future__ import annotations

from typing import Any

import jax

from jengine.models.config import ModelConfig
from jengine.models.config_parts import OutputHead, Rotary
from jengine.models.family import Family, Fields
from jengine.models.glm import GlmAttention
from jengine.models.layers import Layer, LayerNorm, Mlp
from jengine.models.phi import Phi
from jengine.models.pieces import Piece
from jengine.models.residuals import ParallelLayer


class GptJAttention(GlmAttention):
    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.out_proj.{kind}", shape)


class GptJ(Phi):
    prefix = "transformer."
    embed_name, layers_name, norm_name = "wte", "h", "ln_f"

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        norm = LayerNorm(config.hidden_size, config, dtype, f"{name}.ln_1")
        mlp = Mlp(config, dtype, f"{name}.mlp.fc_in", f"{name}.mlp.fc_out")
        return ParallelLayer(norm, GptJAttention(config, dtype, f"{name}.attn"), norm, mlp)


def read_gptj(hf: Fields) -> dict[str, Any]:
    hidden, heads = int(hf["n_embd"]), int(hf["n_head"])
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(hf.get("n_inner") or 4 * hidden),
        "num_layers": int(hf["n_layer"]),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "rope": Rotary(dim=int(hf["rotary_dim"] or hidden // heads)),
        "max_position": int(hf["n_positions"]),
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "activation": hf.get("activation_function", "gelu_new"),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "mlp_bias": True,
        "head": OutputHead(bias=True),
    }


FAMILIES = {"gptj": Family("GPT-J", GptJ, read_gptj, {"n_positions": 2048, "rotary_dim": 64})}
