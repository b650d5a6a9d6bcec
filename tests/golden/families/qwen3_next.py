"""Qwen3-Next, Qwen3.5 and 3.6."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, decoder, experts, gated, head_norms, linear, without
from tests.golden.families.qwen_vl import IDS, encoder3

_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_QWEN3_NEXT = {
    **{
        **SMALL,
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
    },
    **{
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 40,
        "num_experts": 6,
    },
    **{
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
    },
    **_SIZES,
}
_MIXED = {
    **without(_QWEN3_NEXT, "layer_types"),
    **{
        "num_hidden_layers": 4,
        "mlp_only_layers": [1, 2],
        "norm_topk_prob": False,
        "linear_num_value_heads": 2,
    },
    **{"linear_conv_kernel_dim": 3, "attention_bias": True},
}
_QWEN3_5 = {
    **{**without(SMALL, "rope_theta"), "model_type": "qwen3_5_text", "num_hidden_layers": 3, "head_dim": 32},
    **{
        "layer_types": _QWEN3_NEXT["layer_types"],
        "linear_conv_kernel_dim": 4,
        **_SIZES,
        "attn_output_gate": True,
    },
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    },
}
_QWEN3_5_MOE = {
    **without(_QWEN3_5, "intermediate_size", "layer_types"),
    **{
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "moe_intermediate_size": 40,
    },
    **{
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 2,
    },
}
_VISION = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 64, "num_position_embeddings": 16},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next_mixed": _MIXED,
    "qwen3_5": {
        **{"model_type": "qwen3_5", **IDS},
        "text_config": _QWEN3_5,
        "vision_config": {**_VISION, "model_type": "qwen3_5"},
    },
    "qwen3_5_moe": {
        **{"model_type": "qwen3_5_moe", **IDS},
        "text_config": _QWEN3_5_MOE,
        "vision_config": {**_VISION, "model_type": "qwen3_5_moe"},
    },
    "qwen3_5_text": {**_QWEN3_5, "tie_word_embeddings": True, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}


def shapes(config: dict[str, Any]) -> Shapes:
    """With images, as published: also a tensor of a layer for multi-token prediction."""
    if "text_config" in config:
        hidden = config["text_config"]["hidden_size"]
        named = {
            name.replace("model.", "model.language_model.", 1): shape
            for name, shape in shapes(config["text_config"]).items()
        }
        return named | encoder3("model.visual", config["vision_config"]) | {"mtp.norm.weight": (hidden,)}
    every = config.get("full_attention_interval", 4)
    usual = [
        "linear_attention" if (i + 1) % every else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    types = config.get("layer_types") or usual

    def layer(name: str, index: int) -> Shapes:
        linear_attention = types[index] == "linear_attention"
        found = (
            _delta_net(f"{name}.linear_attn", config)
            if linear_attention
            else _attention(f"{name}.self_attn", config)
        )
        if config.get("num_experts") and index not in config.get("mlp_only_layers", []):
            return found | _experts(f"{name}.mlp", config)
        return found | gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"])

    return decoder(config, layer)


def _delta_net(name: str, config: dict[str, Any]) -> Shapes:
    hidden, heads, values = (
        config["hidden_size"],
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
    )
    key, value = heads * config["linear_key_head_dim"], values * config["linear_value_head_dim"]
    products = {"in_proj_qkvz": 2 * key + 2 * value, "in_proj_ba": 2 * values}
    if config["model_type"].startswith("qwen3_5"):
        products = {
            "in_proj_qkv": 2 * key + value,
            "in_proj_z": value,
            "in_proj_b": values,
            "in_proj_a": values,
        }
    return {
        **{f"{name}.{product}.weight": (outputs, hidden) for product, outputs in products.items()},
        f"{name}.conv1d.weight": (2 * key + value, 1, config["linear_conv_kernel_dim"]),
        f"{name}.A_log": (values,),
        f"{name}.dt_bias": (values,),
        f"{name}.norm.weight": (config["linear_value_head_dim"],),
        f"{name}.out_proj.weight": (hidden, value),
    }


def _attention(name: str, config: dict[str, Any]) -> Shapes:
    """Each head of queries comes with one of gates."""
    hidden, dim, heads, kv_heads = (
        config["hidden_size"],
        config["head_dim"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    found, bias = head_norms(name, dim), config.get("attention_bias", False)
    for part, size in {"q": 2 * heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}.items():
        found |= linear(f"{name}.{part}_proj", size, hidden, bias)
    return found | linear(f"{name}.o_proj", hidden, heads * dim, bias)


def _experts(name: str, config: dict[str, Any]) -> Shapes:
    hidden, count, ffn = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    shared = gated(f"{name}.shared_expert", hidden, config["shared_expert_intermediate_size"])
    shared |= linear(f"{name}.shared_expert_gate", 1, hidden)
    if config["model_type"].startswith("qwen3_5"):
        stacked: Shapes = {
            f"{name}.experts.gate_up_proj": (count, 2 * ffn, hidden),
            f"{name}.experts.down_proj": (count, hidden, ffn),
        }
        return shared | linear(f"{name}.gate", count, hidden) | stacked
    return shared | experts(name, count, hidden, ffn)
