"""SmolVLM and Idefics3, with their encoder of images."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, layer_norm, linear
from tests.golden.families import llama

# patches of a frame: 6 by 6, whose positions are not exact in float32
_VISION = {
    "model_type": "smolvlm_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
}

_SMOLVLM = {
    "model_type": "smolvlm",
    "text_config": {**SMALL, "model_type": "llama", "vocab_size": 288, "rms_norm_eps": 1e-5},
    "vision_config": _VISION,
    "image_token_id": 256,
    "scale_factor": 2,
    "tie_word_embeddings": False,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "smolvlm": _SMOLVLM,
    "idefics3": {
        **_SMOLVLM,
        "model_type": "idefics3",
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
        "scale_factor": 3,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    if "vision_config" not in config:
        return llama.shapes(config)
    text, vision, name = config["text_config"], config["vision_config"], "model.vision_model"
    size, patch, scale = vision["hidden_size"], vision["patch_size"], config["scale_factor"]
    found = {
        tensor.replace("model.", "model.text_model.", 1): shape
        for tensor, shape in llama.shapes(text).items()
    }
    found |= {
        f"{name}.embeddings.patch_embedding.weight": (size, 3, patch, patch),
        f"{name}.embeddings.patch_embedding.bias": (size,),
        f"{name}.embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, size),
        "model.connector.modality_projection.proj.weight": (text["hidden_size"], size * scale**2),
    }
    for index in range(vision["num_hidden_layers"]):
        layer = f"{name}.encoder.layers.{index}"
        for part in ("q", "k", "v", "out"):
            found |= linear(f"{layer}.self_attn.{part}_proj", size, size, True)
        found |= linear(f"{layer}.mlp.fc1", vision["intermediate_size"], size, True)
        found |= linear(f"{layer}.mlp.fc2", size, vision["intermediate_size"], True)
        found |= layer_norm(f"{layer}.layer_norm1", size) | layer_norm(f"{layer}.layer_norm2", size)
    return found | layer_norm(f"{name}.post_layernorm", size)
