"""Llama 4."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, attention, decoder, gated, linear

_LLAMA4 = {
    **{
        **SMALL,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "intermediate_size": 24,
        "intermediate_size_mlp": 96,
    },
    **{
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 256,
    },
    **{"floor_scale": 20, "attn_scale": 0.3, "use_qk_norm": True, "pad_token_id": 0},
}
_VISION = {
    **{
        "model_type": "llama4_vision_model",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{
        "image_size": 56,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama4": {"model_type": "llama4", "text_config": _LLAMA4, "vision_config": _VISION},
    "llama4_text": {
        **_LLAMA4,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "interleave_moe_layer_step": 2,
        "moe_layers": None,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    if "text_config" in config:
        named = {f"language_model.{name}": shape for name, shape in shapes(config["text_config"]).items()}
        return named | {
            "vision_model.class_embedding": (32,),
            "multi_modal_projector.linear_1.weight": (64, 32),
        }
    hidden, ffn, count, step = (
        *(config[n] for n in ("hidden_size", "intermediate_size", "num_local_experts")),
        config.get("interleave_moe_layer_step", 1),
    )
    sparse = config["moe_layers"] or [*range(step - 1, config["num_hidden_layers"], step)]

    def layer(name: str, index: int) -> Shapes:
        found, module = attention(f"{name}.self_attn", config), f"{name}.feed_forward"
        if index not in sparse:
            return found | gated(module, hidden, config["intermediate_size_mlp"])
        found |= linear(f"{module}.router", count, hidden) | gated(f"{module}.shared_expert", hidden, ffn)
        stacked: Shapes = {
            f"{module}.experts.gate_up_proj": (count, hidden, 2 * ffn),
            f"{module}.experts.down_proj": (count, ffn, hidden),
        }
        return found | stacked

    return decoder(config, layer)
