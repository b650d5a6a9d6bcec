"""Names and shapes of the tensors of families with experts and caches of their own kinds: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def gpt_oss(config: dict[str, Any]) -> Shapes:
    hidden, ffn, experts, dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts", "head_dim")
    )
    heads, kv_heads, table = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        (config["vocab_size"], hidden),
    )
    shapes: Shapes = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (hidden,),
        "lm_head.weight": table,
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes |= _linear(f"{name}.self_attn.{part}_proj", count * dim, hidden)
        shapes |= _linear(f"{name}.self_attn.o_proj", hidden, heads * dim) | _linear(
            f"{name}.mlp.router", experts, hidden
        )
        shapes |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        stacked = {
            "gate_up_proj": (hidden, 2 * ffn),
            "gate_up_proj_bias": (2 * ffn,),
            "down_proj": (ffn, hidden),
            "down_proj_bias": (hidden,),
        }
        shapes |= {f"{name}.mlp.experts.{part}": (experts, *shape) for part, shape in stacked.items()}
        shapes[f"{name}.self_attn.sinks"] = (heads,)
    return shapes


def deepseek(config: dict[str, Any]) -> Shapes:
    """DeepSeek V2 and V3, GLM-4.7-Flash."""
    hidden, ffn, heads, rank = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "kv_lora_rank")
    )
    key, rotary, value, query_rank = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    )
    table, first, v2 = (
        (config["vocab_size"], hidden),
        config.get("first_k_dense_replace", 1),
        config["model_type"] == "deepseek_v2",
    )
    shapes: Shapes = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (hidden,),
        "lm_head.weight": table,
    }
    products = {
        "kv_a_proj_with_mqa": (rank + rotary, hidden),
        "kv_b_proj": (heads * (key + value), rank),
        "o_proj": (hidden, heads * value),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.kv_a_layernorm": rank}
    if query_rank is None:
        products["q_proj"] = (heads * (key + rotary), hidden)
    else:
        products |= {"q_a_proj": (query_rank, hidden), "q_b_proj": (heads * (key + rotary), query_rank)}
        norms["self_attn.q_a_layernorm"] = query_rank
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}.weight": shape for part, shape in products.items()}
        shapes |= {f"{name}.{norm}.weight": (size,) for norm, size in norms.items()}
        if layer < first:
            shapes |= _gated(f"{name}.mlp", ffn, hidden)
            continue
        size, experts = config["moe_intermediate_size"], config["n_routed_experts"]
        shapes[f"{name}.mlp.gate.weight"] = (experts, hidden)
        shapes |= {} if v2 else {f"{name}.mlp.gate.e_score_correction_bias": (experts,)}
        shapes |= _gated(f"{name}.mlp.shared_experts", size * config["n_shared_experts"], hidden)
        for expert in range(experts):
            shapes |= _gated(f"{name}.mlp.experts.{expert}", size, hidden)
    return shapes


def _gated(name: str, size: int, hidden: int) -> Shapes:
    shapes: Shapes = {f"{name}.{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
    return shapes | {f"{name}.down_proj.weight": (hidden, size)}


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
