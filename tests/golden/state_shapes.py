"""Names and shapes of tensors of families with recurrent states: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _swiglu(name: str, hidden: int, ffn: int) -> Shapes:
    return {
        f"{name}.{part}_proj.weight": (hidden, ffn) if part == "down" else (ffn, hidden)
        for part in ("gate", "up", "down")
    }


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
    hidden, dim, heads, kv_heads = (
        config["hidden_size"],
        config["head_dim"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    outputs = {"q": 2 * heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    shapes: Shapes = {f"{name}.{part}_proj.weight": (size, hidden) for part, size in outputs.items()}
    shapes[f"{name}.o_proj.weight"] = hidden, heads * dim
    if config.get("attention_bias"):
        shapes |= {f"{name}.{part}_proj.bias": (size,) for part, size in {**outputs, "o": hidden}.items()}
    return shapes | {f"{name}.{part}_norm.weight": (dim,) for part in "qk"}


def _experts(name: str, config: dict[str, Any]) -> Shapes:
    hidden, experts, ffn = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    shapes: Shapes = {
        f"{name}.gate.weight": (experts, hidden),
        f"{name}.shared_expert_gate.weight": (1, hidden),
    }
    shapes |= _swiglu(f"{name}.shared_expert", hidden, config["shared_expert_intermediate_size"])
    if config["model_type"].startswith("qwen3_5"):
        return shapes | {
            f"{name}.experts.gate_up_proj": (experts, 2 * ffn, hidden),
            f"{name}.experts.down_proj": (experts, hidden, ffn),
        }
    for expert in range(experts):
        shapes |= _swiglu(f"{name}.experts.{expert}", hidden, ffn)
    return shapes


def qwen3_next(config: dict[str, Any]) -> Shapes:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    every = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer, kind in enumerate(types):
        name = f"model.layers.{layer}"
        if kind == "linear_attention":
            shapes |= _delta_net(f"{name}.linear_attn", config)
        else:
            shapes |= _attention(f"{name}.self_attn", config)
        if config.get("num_experts") and layer not in config.get("mlp_only_layers", []):
            shapes |= _experts(f"{name}.mlp", config)
        else:
            shapes |= _swiglu(f"{name}.mlp", hidden, config["intermediate_size"])
        shapes |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    return shapes | (
        {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], hidden)}
    )


def qwen3_5(config: dict[str, Any]) -> Shapes:
    """As published: also with some tensors of a vision model, and with a layer for multi-token prediction."""
    text = qwen3_next(config["text_config"])
    named = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    hidden = config["text_config"]["hidden_size"]
    return named | {
        "model.visual.merger.norm.weight": (config["vision_config"]["hidden_size"],),
        "mtp.norm.weight": (hidden,),
    }
