"""Gemma 4."""

from __future__ import annotations

from typing import Any

from tests.golden.declaring import SMALL, Shapes, decoder, gated, linear, types, without

_GEMMA4 = {
    **{
        **without(SMALL, "rope_theta"),
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 7,
    },
    **{
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "intermediate_size": 48,
        "hidden_size_per_layer_input": 12,
    },
    **{
        "vocab_size_per_layer_input": 64,
        "tie_word_embeddings": True,
        "attention_k_eq_v": False,
        "pad_token_id": 0,
    },
    **{
        "layer_types": types("sliding", "full", "sliding", "sliding", "sliding", "sliding", "full"),
        "sliding_window": 30,
    },
}
_EXPERTS = {
    **{
        **_GEMMA4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    },
    **{
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 1.0,
    },
    **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
    "layer_types": types("sliding", "sliding", "full", "full"),
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    },
}
_VISION = {
    **{
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{"num_key_value_heads": 2, "head_dim": 16},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "model_type": "gemma4",
        "text_config": _GEMMA4,
        "vision_config": _VISION,
        "audio_config": None,
    },
    "gemma4_images": {
        **{"model_type": "gemma4", "text_config": {**_GEMMA4, "use_bidirectional_attention": "vision"}},
        **{"boi_token_id": 61, "eoi_token_id": 62, "image_token_id": 63, "audio_config": None},
        "vision_config": {
            **{**_VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 2},
            **{"position_embedding_size": 1024, "use_clipped_linears": True, "standardize": True},
        },
    },
    "gemma4_text": _EXPERTS,
}
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
BOUNDS = "input_min", "input_max", "output_min", "output_max"
OF_EXPERTS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


def shapes(config: dict[str, Any]) -> Shapes:
    if "text_config" in config:
        named = with_images(config, shapes(config["text_config"]))
        del named["model.vision_tower.std_scale"]  # only encoders that standardize have it
        return named | _vision(config["vision_config"])
    hidden, layers, heads, ffn = (
        config[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    )
    inputs, first, routed = (
        config["hidden_size_per_layer_input"],
        layers - config["num_kv_shared_layers"],
        config.get("enable_moe_block"),
    )

    def layer(name: str, index: int) -> Shapes:
        full = config["layer_types"][index] == "full_attention"
        dim, one_matrix = (
            config["global_head_dim"] if full else config["head_dim"],
            full and config["attention_k_eq_v"],
        )
        kv = dim * (config["num_global_key_value_heads"] if one_matrix else config["num_key_value_heads"])
        found = linear(f"{name}.self_attn.q_proj", heads * dim, hidden) | linear(
            f"{name}.self_attn.o_proj", hidden, heads * dim
        )
        found |= {f"{name}.self_attn.q_norm.weight": (dim,), f"{name}.layer_scalar": (1,)}
        if index < first:
            found |= linear(f"{name}.self_attn.k_proj", kv, hidden) | {
                f"{name}.self_attn.k_norm.weight": (dim,)
            }
            found |= {} if one_matrix else linear(f"{name}.self_attn.v_proj", kv, hidden)
        found |= gated(
            f"{name}.mlp", hidden, ffn * (2 if index >= first and config["use_double_wide_mlp"] else 1)
        )
        return (
            found
            | (_experts(name, config) if routed else {})
            | (layer_input(name, hidden, inputs) if inputs else {})
        )

    return decoder(config, layer, (*NORMS, *OF_EXPERTS) if routed else NORMS) | (
        layer_inputs(config) if inputs else {}
    )


def _experts(name: str, config: dict[str, Any]) -> Shapes:
    hidden, count, ffn = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    return {
        **linear(f"{name}.router.proj", count, hidden),
        f"{name}.router.scale": (hidden,),
        f"{name}.router.per_expert_scale": (count,),
        f"{name}.experts.gate_up_proj": (count, 2 * ffn, hidden),
        f"{name}.experts.down_proj": (count, hidden, ffn),
    }


def layer_input(name: str, hidden: int, inputs: int) -> Shapes:
    """Tensors of a layer with per-layer input embeddings."""
    both = linear(f"{name}.per_layer_input_gate", inputs, hidden) | linear(
        f"{name}.per_layer_projection", hidden, inputs
    )
    return both | {f"{name}.post_per_layer_input_norm.weight": (hidden,)}


def layer_inputs(config: dict[str, Any]) -> Shapes:
    """The table of these embeddings."""
    inputs, hidden = config["hidden_size_per_layer_input"], config["hidden_size"]
    size = config["num_hidden_layers"] * inputs
    return {
        "model.embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], size),
        **linear("model.per_layer_model_projection", size, hidden),
        "model.per_layer_projection_norm.weight": (inputs,),
    }


def with_images(config: dict[str, Any], text: Shapes) -> Shapes:
    """As published: also some tensors of the other parts, and keys of a layer that reads those of another."""
    named = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    last, hidden = config["text_config"]["num_hidden_layers"] - 1, config["text_config"]["hidden_size"]
    named[f"model.language_model.layers.{last}.self_attn.k_proj.weight"] = 64, hidden
    return named | {
        "model.vision_tower.std_scale": (32,),
        "model.embed_vision.embedding_projection.weight": (hidden, 32),
    }


def _vision(config: dict[str, Any]) -> Shapes:
    hidden, ffn, dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    products = {
        **{
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
        },
        **{"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)},
        "mlp.down_proj": (hidden, ffn),
    }
    out: Shapes = {
        **{f"model.vision_tower.std_{part}": (hidden,) for part in ("bias", "scale")},
        **linear(
            "model.vision_tower.patch_embedder.input_proj", hidden, 3 * config.get("patch_size", 16) ** 2
        ),
        "model.vision_tower.patch_embedder.position_embedding_table": (
            *(2, config.get("position_embedding_size", 10240)),
            hidden,
        ),
    }
    if not config.get("standardize"):
        out = {name: shape for name, shape in out.items() if ".std_" not in name}
    for i in range(config["num_hidden_layers"]):
        name = f"model.vision_tower.encoder.layers.{i}"
        out |= {f"{name}.{norm}.weight": (hidden,) for norm in NORMS}
        out |= {f"{name}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        for product, shape in products.items():
            out[f"{name}.{product}.linear.weight"] = shape
            if config.get("use_clipped_linears"):
                out |= {f"{name}.{product}.{bound}": () for bound in BOUNDS}
    return out
