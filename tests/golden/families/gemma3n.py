"""Gemma 3n."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, decoder, gated, linear, types
from tests.golden.families.gemma4 import NORMS, layer_input, layer_inputs, with_images

_GEMMA3N = {
    **{
        **SMALL,
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "num_hidden_layers": 6,
        "sliding_window": 30,
        "num_kv_shared_layers": 2,
    },
    **{
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 50,
        "tie_word_embeddings": True,
        "intermediate_size": 48,
    },
    **{
        "altup_num_inputs": 3,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.0, 0.0],
    },
    **{
        "layer_types": types("sliding", "full", "sliding", "full", "sliding", "full"),
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    **{"final_logit_softcapping": 2.0, "pad_token_id": 0},
}
_VISION = {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 32}

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3n": {"model_type": "gemma3n", "text_config": _GEMMA3N, "vision_config": _VISION},
    "gemma3n_text": {
        **{**_GEMMA3N, "intermediate_size": [48] * 6, "num_kv_shared_layers": 0, "altup_active_idx": 1},
        "altup_correct_scale": False,
    },
}


def shapes(config: dict[str, Any]) -> Shapes:
    if "text_config" in config:
        return with_images(config, shapes(config["text_config"]))
    hidden, dim, streams, rank = (
        config[n] for n in ("hidden_size", "head_dim", "altup_num_inputs", "laurel_rank")
    )
    first, ffn = config["num_hidden_layers"] - config["num_kv_shared_layers"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def layer(name: str, index: int) -> Shapes:
        found = linear(f"{name}.self_attn.q_proj", q, hidden) | linear(f"{name}.self_attn.o_proj", hidden, q)
        for part in "kv" if index < first else "":
            found |= linear(f"{name}.self_attn.{part}_proj", kv, hidden)
        found |= {
            f"{name}.self_attn.{part}_norm.weight": (dim,) for part in ("q" if index >= first else "qk")
        }
        found |= gated(f"{name}.mlp", hidden, ffn[index] if isinstance(ffn, list) else ffn)
        found |= linear(f"{name}.altup.modality_router", streams, hidden) | linear(
            f"{name}.altup.correction_coefs", streams, streams
        )
        found |= linear(f"{name}.altup.prediction_coefs", streams**2, streams)
        found |= linear(f"{name}.laurel.linear_left", rank, hidden) | linear(
            f"{name}.laurel.linear_right", hidden, rank
        )
        norms = "altup.router_norm.weight", "altup.correct_output_scale", "laurel.post_laurel_norm.weight"
        found |= {f"{name}.{norm}": (hidden,) for norm in norms}
        return found | layer_input(name, hidden, config["hidden_size_per_layer_input"])

    found = decoder(config, layer, NORMS) | layer_inputs(config)
    for stream in range(streams - 1):
        found |= {
            f"model.altup_{kind}projections.{stream}.weight": (hidden, hidden) for kind in ("", "unembed_")
        }
    return found
