"""Mistral, Ministral 3 and Mistral 3."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, VISION, YARN, Shapes, attention, decoder, gated
from tests.golden.families.llama import PLAIN

_MISTRAL = {**PLAIN, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
_MINISTRAL3 = {
    **{**SMALL, "model_type": "ministral3", "head_dim": 16, "sliding_window": None},
    "rope_parameters": {
        **YARN,
        "rope_theta": 10000.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "mistral_window": {**_MISTRAL, "sliding_window": 24},
    "mistral_head_dim": {**_MISTRAL, "sliding_window": None, "head_dim": 24},
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {**SMALL, "model_type": "mistral", "head_dim": 24, "sliding_window": None},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        "tie_word_embeddings": False,
    },
    "ministral3": _MINISTRAL3,
}
ALL_LENGTHS = ("mistral_window", "mistral_head_dim")


def shapes(config: dict[str, Any]) -> Shapes:
    """With images: also some tensors of the other parts."""
    if "text_config" in config:
        named = {
            name.replace("model.", "model.language_model.", 1): shape
            for name, shape in shapes(config["text_config"]).items()
        }
        size = config["vision_config"]["hidden_size"]
        return named | {
            "model.multi_modal_projector.norm.weight": (size,),
            "model.vision_tower.ln_pre.weight": (size,),
        }

    def layer(name: str, index: int) -> Shapes:
        return attention(f"{name}.self_attn", config) | gated(
            f"{name}.mlp", config["hidden_size"], config["intermediate_size"]
        )

    return decoder(config, layer)
