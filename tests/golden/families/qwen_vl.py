"""Qwen2.5-VL and Qwen3-VL, with their vision parts."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import (
    SMALL,
    Shapes,
    attention,
    decoder,
    gated,
    head_norms,
    layer_norm,
    linear,
    rms_norm,
    without,
)

IDS = {"image_token_id": 61, "video_token_id": 62, "vision_start_token_id": 59, "vision_end_token_id": 60}
_QWEN3 = {
    **{**without(SMALL, "rope_theta"), "model_type": "qwen3_vl_text", "num_hidden_layers": 3, "head_dim": 24},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 5e6},
        **{"mrope_interleaved": True, "mrope_section": [6, 3, 3]},
    },
}
_QWEN3_MOE = {
    **_QWEN3,
    **{"model_type": "qwen3_vl_moe_text", "num_experts": 6, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True},
}
_VISION3 = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 64, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
}
_QWEN2 = {
    **{**without(SMALL, "rope_theta"), "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
}
_VISION2 = {
    **{"model_type": "qwen2_5_vl", "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
    **{"patch_size": 4, "out_hidden_size": 64, "window_size": 24, "fullatt_block_indexes": [1]},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**_QWEN2, "model_type": "qwen2_5_vl", **IDS, "vision_config": _VISION2},
    "qwen3_vl": {
        **{"model_type": "qwen3_vl", "text_config": _QWEN3, **IDS},
        "vision_config": {**_VISION3, "model_type": "qwen3_vl"},
    },
    "qwen3_vl_moe": {
        **{"model_type": "qwen3_vl_moe", "text_config": _QWEN3_MOE, **IDS},
        "vision_config": {**_VISION3, "model_type": "qwen3_vl_moe"},
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    """As published: Qwen2.5-VL's text model is in the whole model's configuration, with its own names of
    tensors.
    """
    if "text_config" in config:
        named = {
            name.replace("model.", "model.language_model.", 1): shape
            for name, shape in shapes(config["text_config"]).items()
        }
        return named | encoder3("model.visual", config["vision_config"])
    hidden, sparse = config["hidden_size"], "num_experts" in config
    if "vision_config" in config:

        def qwen2(name: str, index: int) -> Shapes:
            found = attention(f"{name}.self_attn", config, bias=True, output_bias=False)
            return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])

        return decoder(config, qwen2) | _encoder2("visual", config["vision_config"])

    def layer(name: str, index: int) -> Shapes:
        found = attention(f"{name}.self_attn", config)
        found |= head_norms(f"{name}.self_attn", config["head_dim"])
        if not sparse or index in config["mlp_only_layers"]:
            return found | gated(f"{name}.mlp", hidden, config["intermediate_size"])
        count, ffn = config["num_experts"], config["moe_intermediate_size"]
        return found | {
            f"{name}.mlp.gate.weight": (count, hidden),
            f"{name}.mlp.experts.gate_up_proj": (count, hidden, 2 * ffn),
            f"{name}.mlp.experts.down_proj": (count, ffn, hidden),
        }

    return decoder(config, layer)


def _encoder2(name: str, config: dict[str, Any]) -> Shapes:
    hidden, merged = config["hidden_size"], 4 * config["hidden_size"]
    patch = config["patch_size"]
    found: Shapes = {f"{name}.patch_embed.proj.weight": (hidden, 3, 2, patch, patch)}
    for i in range(config["depth"]):
        block = f"{name}.blocks.{i}"
        found |= rms_norm(f"{block}.norm1", hidden) | rms_norm(f"{block}.norm2", hidden)
        found |= linear(f"{block}.attn.qkv", 3 * hidden, hidden, True)
        found |= linear(f"{block}.attn.proj", hidden, hidden, True)
        found |= gated(f"{block}.mlp", hidden, config["intermediate_size"], True)
    found |= rms_norm(f"{name}.merger.ln_q", hidden)
    found |= linear(f"{name}.merger.mlp.0", merged, merged, True)
    return found | linear(f"{name}.merger.mlp.2", config["out_hidden_size"], merged, True)


def encoder3(name: str, config: dict[str, Any]) -> Shapes:
    hidden, ffn, merged = config["hidden_size"], config["intermediate_size"], 4 * config["hidden_size"]
    patch = config["patch_size"]
    found: Shapes = {
        f"{name}.patch_embed.proj.weight": (hidden, 3, 2, patch, patch),
        f"{name}.patch_embed.proj.bias": (hidden,),
        f"{name}.pos_embed.weight": (config["num_position_embeddings"], hidden),
    }
    for i in range(config["depth"]):
        block = f"{name}.blocks.{i}"
        found |= layer_norm(f"{block}.norm1", hidden) | layer_norm(f"{block}.norm2", hidden)
        found |= linear(f"{block}.attn.qkv", 3 * hidden, hidden, True)
        found |= linear(f"{block}.attn.proj", hidden, hidden, True)
        found |= linear(f"{block}.mlp.linear_fc1", ffn, hidden, True)
        found |= linear(f"{block}.mlp.linear_fc2", hidden, ffn, True)
    mergers = {f"{name}.merger": hidden}
    mergers |= {
        f"{name}.deepstack_merger_list.{i}": merged
        for i in range(len(config.get("deepstack_visual_indexes", ())))
    }
    for merger, normed in mergers.items():
        found |= layer_norm(f"{merger}.norm", normed) | linear(f"{merger}.linear_fc1", merged, merged, True)
        found |= linear(f"{merger}.linear_fc2", config["out_hidden_size"], merged, True)
    return found
