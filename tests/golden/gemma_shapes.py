"""Names and shapes of Gemma 3n's and 4's tensors: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)}


def _mlp(name: str, hidden: int, ffn: int) -> Shapes:
    return {
        **_linear(f"{name}.gate_proj", ffn, hidden),
        **_linear(f"{name}.up_proj", ffn, hidden),
        **_linear(f"{name}.down_proj", hidden, ffn),
    }


def gemma4(config: dict[str, Any]) -> Shapes:
    hidden, layers, heads, ffn = (
        config[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    )
    inputs, first = config["hidden_size_per_layer_input"], layers - config["num_kv_shared_layers"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if inputs:
        shapes["model.embed_tokens_per_layer.weight"] = config["vocab_size_per_layer_input"], layers * inputs
        shapes |= _linear("model.per_layer_model_projection", layers * inputs, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (inputs,)
    for layer, kind in enumerate(config["layer_types"]):
        name, full = f"model.layers.{layer}", kind == "full_attention"
        dim, one_matrix = (
            config["global_head_dim"] if full else config["head_dim"],
            full and config["attention_k_eq_v"],
        )
        kv = dim * (config["num_global_key_value_heads"] if one_matrix else config["num_key_value_heads"])
        shapes |= _linear(f"{name}.self_attn.q_proj", heads * dim, hidden) | _linear(
            f"{name}.self_attn.o_proj", hidden, heads * dim
        )
        shapes[f"{name}.self_attn.q_norm.weight"] = (dim,)
        if layer < first:
            shapes |= _linear(f"{name}.self_attn.k_proj", kv, hidden) | {
                f"{name}.self_attn.k_norm.weight": (dim,)
            }
            shapes |= {} if one_matrix else _linear(f"{name}.self_attn.v_proj", kv, hidden)
        shapes |= _mlp(
            f"{name}.mlp", hidden, ffn * (2 if layer >= first and config["use_double_wide_mlp"] else 1)
        )
        norms = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        if config.get("enable_moe_block"):
            norms += [
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            ]
            shapes |= _experts(name, config)
        if inputs:
            norms.append("post_per_layer_input_norm")
            shapes |= _linear(f"{name}.per_layer_input_gate", inputs, hidden) | _linear(
                f"{name}.per_layer_projection", hidden, inputs
            )
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in norms} | {f"{name}.layer_scalar": (1,)}
    return shapes


def _experts(name: str, config: dict[str, Any]) -> Shapes:
    hidden, experts, ffn = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    return {
        f"{name}.router.proj.weight": (experts, hidden),
        f"{name}.router.scale": (hidden,),
        f"{name}.router.per_expert_scale": (experts,),
        f"{name}.experts.gate_up_proj": (experts, 2 * ffn, hidden),
        f"{name}.experts.down_proj": (experts, hidden, ffn),
    }


def gemma3n(config: dict[str, Any]) -> Shapes:
    hidden, layers, dim, streams = (
        config[n] for n in ("hidden_size", "num_hidden_layers", "head_dim", "altup_num_inputs")
    )
    inputs, first, rank = (
        config["hidden_size_per_layer_input"],
        layers - config["num_kv_shared_layers"],
        config["laurel_rank"],
    )
    q, kv, ffn = (
        config["num_attention_heads"] * dim,
        config["num_key_value_heads"] * dim,
        config["intermediate_size"],
    )
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], layers * inputs),
        "model.per_layer_model_projection.weight": (layers * inputs, hidden),
        "model.per_layer_projection_norm.weight": (inputs,),
        "model.norm.weight": (hidden,),
    }
    for stream in range(streams - 1):
        shapes |= {
            f"model.altup_{kind}projections.{stream}.weight": (hidden, hidden) for kind in ("", "unembed_")
        }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= _linear(f"{name}.self_attn.q_proj", q, hidden) | _linear(
            f"{name}.self_attn.o_proj", hidden, q
        )
        for part in "kv" if layer < first else "":
            shapes |= _linear(f"{name}.self_attn.{part}_proj", kv, hidden)
        shapes |= {
            f"{name}.self_attn.{part}_norm.weight": (dim,) for part in ("q" if layer >= first else "qk")
        }
        shapes |= _mlp(f"{name}.mlp", hidden, ffn[layer] if isinstance(ffn, list) else ffn)
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in norms}
        shapes |= _linear(f"{name}.altup.modality_router", streams, hidden) | _linear(
            f"{name}.altup.correction_coefs", streams, streams
        )
        shapes |= _linear(f"{name}.altup.prediction_coefs", streams**2, streams) | {
            f"{name}.altup.router_norm.weight": (hidden,)
        }
        shapes |= _linear(f"{name}.laurel.linear_left", rank, hidden) | _linear(
            f"{name}.laurel.linear_right", hidden, rank
        )
        shapes |= {
            f"{name}.altup.correct_output_scale": (hidden,),
            f"{name}.laurel.post_laurel_norm.weight": (hidden,),
        }
        shapes |= _linear(f"{name}.per_layer_input_gate", inputs, hidden) | _linear(
            f"{name}.per_layer_projection", hidden, inputs
        )
        shapes[f"{name}.post_per_layer_input_norm.weight"] = (hidden,)
    return shapes


def gemma_images(config: dict[str, Any]) -> Shapes:
    """As published: beside the text model, some tensors of the other parts; and keys of a layer that reads
    those of another.
    """
    text = (gemma4 if config["model_type"] == "gemma4" else gemma3n)(config["text_config"])
    named = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    last, hidden = config["text_config"]["num_hidden_layers"] - 1, config["text_config"]["hidden_size"]
    named[f"model.language_model.layers.{last}.self_attn.k_proj.weight"] = 64, hidden
    return named | {
        "model.vision_tower.std_scale": (32,),
        "model.embed_vision.embedding_projection.weight": (hidden, 32),
    }
