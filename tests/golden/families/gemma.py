"""Gemma, Gemma 2 and 3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import (
    SMALL,
    VISION,
    Shapes,
    attention,
    decoder,
    gated,
    head_norms,
    layer_norm,
    linear,
)
from tests.golden.families.llama import PLAIN

_GEMMA = {
    **SMALL,
    "model_type": "gemma",
    "head_dim": 24,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "num_key_value_heads": 1,
}
_GEMMA2 = {
    **{
        **PLAIN,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 3,
        "head_dim": 24,
    },
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    **{"final_logit_softcapping": 1.0, "sliding_window": 30, "tie_word_embeddings": True},
}
_LOCAL = {
    **{"sliding_window_pattern": 2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GEMMA3 = {
    **{
        **_GEMMA2,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
    },
    **{"final_logit_softcapping": None, **_LOCAL},
}
_GEMMA3_TEXT = {
    **{
        **SMALL,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    **{"query_pre_attn_scalar": 20, "sliding_window": 30, **_LOCAL, "tie_word_embeddings": True},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_images": {
        **{"model_type": "gemma3", "mm_tokens_per_image": 25, "text_config": _GEMMA3_TEXT},
        **{"boi_token_index": 61, "eoi_token_index": 62, "image_token_index": 63},
        "vision_config": {
            **{**VISION, "model_type": "siglip_vision_model", "num_hidden_layers": 2},
            **{"image_size": 40, "patch_size": 4, "vision_use_head": False},
        },
    },
}
ALL_LENGTHS = ("gemma2", "gemma3")
NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def shapes(config: dict[str, Any]) -> Shapes:
    """With images: names in the older way."""
    if "text_config" in config:
        text, vision = shapes(config["text_config"]), config["vision_config"]
        out, size = config["text_config"]["hidden_size"], vision["hidden_size"]
        projector: Shapes = {
            "multi_modal_projector.mm_soft_emb_norm.weight": (size,),
            "multi_modal_projector.mm_input_projection_weight": (size, out),
        }
        named = {f"language_model.{name}": shape for name, shape in text.items()}
        return named | projector | _siglip("vision_tower.vision_model", vision)

    def layer(name: str, index: int) -> Shapes:
        norms = (
            head_norms(f"{name}.self_attn", config["head_dim"])
            if config["model_type"] == "gemma3_text"
            else {}
        )
        mlp = gated(f"{name}.mlp", config["hidden_size"], config["intermediate_size"])
        return attention(f"{name}.self_attn", config) | norms | mlp

    return decoder(config, layer, NORMS if config["model_type"] == "gemma" else SANDWICH)


def _siglip(name: str, config: dict[str, Any]) -> Shapes:
    size, ffn, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    found: Shapes = {
        f"{name}.embeddings.patch_embedding.weight": (size, 3, patch, patch),
        f"{name}.embeddings.patch_embedding.bias": (size,),
        f"{name}.embeddings.position_embedding.weight": ((config["image_size"] // patch) ** 2, size),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"{name}.encoder.layers.{i}"
        found |= layer_norm(f"{layer}.layer_norm1", size) | layer_norm(f"{layer}.layer_norm2", size)
        for part in ("q", "k", "v", "out"):
            found |= linear(f"{layer}.self_attn.{part}_proj", size, size, True)
        found |= linear(f"{layer}.mlp.fc1", ffn, size, True) | linear(f"{layer}.mlp.fc2", size, ffn, True)
    return found | layer_norm(f"{name}.post_layernorm", size)
