"""MiniMax-Text-01 and M1."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, W, attention, decoder, experts, types

_MINIMAX = {
    **{
        **SMALL,
        "model_type": "minimax",
        "num_hidden_layers": 4,
        "head_dim": 24,
        "block_size": 32,
        "intermediate_size": 24,
    },
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    **{
        "full_attn_alpha_factor": 2.0,
        "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 0.8,
        "linear_attn_beta_factor": 1.5,
    },
    **{"mlp_alpha_factor": 1.3, "mlp_beta_factor": 0.6},
}
_UNSCALED = {name: 1.0 for name in _MINIMAX if name.endswith("_factor")}
_BOTH = {
    "num_hidden_layers": 2,
    "layer_types": types("linear", "full"),
    "attn_type_list": [0, 1],
    "postnorm": True,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "minimax": _MINIMAX,
    "minimax_ties": {
        **{
            **_MINIMAX,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "block_size": 256,
        },
        "layer_types": types("linear", "linear", "full"),
    },
    # transformers knows these two as minimax: their factors under both names
    "minimax_m1": {
        **{**_MINIMAX, **_BOTH, "model_type": "minimax_m1", "shared_intermediate_size": 0},
        **{"layernorm_full_attention_alpha": 2.0, "layernorm_full_attention_beta": 0.7},
        **{"layernorm_linear_attention_alpha": 0.8, "layernorm_linear_attention_beta": 1.5},
        **{"layernorm_mlp_alpha": 1.3, "layernorm_mlp_beta": 0.6},
    },
    "minimax_text_01": {**_MINIMAX, **_UNSCALED, **_BOTH, "model_type": "minimax_text_01"},
}


def shapes(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    usual = ["linear_attention" if i % 2 else "full_attention" for i in range(config["num_hidden_layers"])]
    products = {
        "qkv_proj": (3 * inner, hidden),
        "output_gate": (inner, hidden),
        "out_proj": (hidden, inner),
        "norm": (inner,),
    }

    def layer(name: str, index: int) -> Shapes:
        linear = (config.get("layer_types") or usual)[index] == "linear_attention"
        lightning: Shapes = {
            f"{name}.self_attn.{product}.weight": shape for product, shape in products.items()
        }
        mixer = lightning if linear else attention(f"{name}.self_attn", config)
        return mixer | experts(
            f"{name}.block_sparse_moe",
            config["num_local_experts"],
            hidden,
            config["intermediate_size"],
            parts=W,
        )

    return decoder(config, layer)
