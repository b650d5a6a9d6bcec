"""Names and shapes of the tensors in Hugging Face's checkpoints, written down apart from what jengine declares."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Every tensor of a checkpoint with this configuration."""
    return _llama(config)


def _llama(config: dict[str, Any]) -> Shapes:
    family, hidden, ffn, heads = config["model_type"], config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv, table = heads * dim, config["num_key_value_heads"] * dim, (config["vocab_size"], hidden)
    projections = {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
    if family == "phi3":
        projections |= {"self_attn.qkv_proj": (q + 2 * kv, hidden), "mlp.gate_up_proj": (2 * ffn, hidden)}
    else:
        projections |= {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        projections |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    biased = {"self_attn": config.get("attention_bias"), "mlp": config.get("mlp_bias")}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in projections.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if biased[name.split(".")[0]] or (family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj")):
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    return shapes
