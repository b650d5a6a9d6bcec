"""Names and shapes of the tensors of families with experts and caches of their own kinds: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def gpt_oss(config: dict[str, Any]) -> Shapes:
    hidden, ffn, experts, dim = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts", "head_dim"))
    heads, kv_heads, table = config["num_attention_heads"], config["num_key_value_heads"], (config["vocab_size"], hidden)
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,), "lm_head.weight": table}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes |= _linear(f"{name}.self_attn.{part}_proj", count * dim, hidden)
        shapes |= _linear(f"{name}.self_attn.o_proj", hidden, heads * dim) | _linear(f"{name}.mlp.router", experts, hidden)
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


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
