"""Names and shapes of tensors of Cohere, MiniMax-Text-01 and other families with experts: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _swiglu(
    name: str, hidden: int, ffn: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = parts
    return (
        _linear(f"{name}.{gate}", ffn, hidden)
        | _linear(f"{name}.{up}", ffn, hidden)
        | _linear(f"{name}.{down}", hidden, ffn)
    )


def _attention(name: str, config: dict[str, Any]) -> Shapes:
    family, hidden, heads, kv_heads = (
        config[n] for n in ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    dim, bias = config.get("head_dim") or hidden // heads, config.get("attention_bias", False)
    inward = config.get("qkv_bias", True) if family == "qwen2_moe" else bias
    shapes: Shapes = {}
    for part, size in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
        shapes |= _linear(f"{name}.{part}_proj", size, hidden, inward)
    shapes |= _linear(f"{name}.o_proj", hidden, heads * dim, bias)
    if config.get("use_qk_norm"):
        shapes |= {f"{name}.q_norm.weight": (heads, dim), f"{name}.k_norm.weight": (kv_heads, dim)}
    if family == "olmoe":
        shapes |= {f"{name}.q_norm.weight": (heads * dim,), f"{name}.k_norm.weight": (kv_heads * dim,)}
    return shapes


def _lightning(name: str, config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    products = {
        "qkv_proj": (3 * inner, hidden),
        "output_gate": (inner, hidden),
        "out_proj": (hidden, inner),
        "norm": (inner,),
    }
    return {f"{name}.{product}.weight": shape for product, shape in products.items()}


def _experts(name: str, config: dict[str, Any]) -> Shapes:
    family, hidden = config["model_type"], config["hidden_size"]
    experts, ffn = (
        config.get("num_local_experts") or config["num_experts"],
        config.get("moe_intermediate_size"),
    )
    if family == "granitemoe":
        name, ffn = f"{name}.block_sparse_moe", config["intermediate_size"]
        stacked = {
            "input_linear": (experts, 2 * ffn, hidden),
            "output_linear": (experts, hidden, ffn),
            "router.layer": (experts, hidden),
        }
        return {f"{name}.{part}.weight": shape for part, shape in stacked.items()}
    mixtral = family.startswith("minimax") or family == "phimoe"
    name, parts = (
        (f"{name}.block_sparse_moe", ("w1", "w3", "w2"))
        if mixtral
        else (f"{name}.mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    shapes: Shapes = {f"{name}.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _swiglu(f"{name}.experts.{expert}", hidden, ffn or config["intermediate_size"], parts)
    if shared := config.get("shared_expert_intermediate_size"):
        shapes |= _swiglu(f"{name}.shared_expert", hidden, shared) | _linear(
            f"{name}.shared_expert_gate", 1, hidden
        )
    return shapes


def llama_like(config: dict[str, Any]) -> Shapes:
    family, hidden, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    biased, cohere = family == "phimoe", family.startswith("cohere")
    usual = ["linear_attention" if family == "minimax" and i % 2 else "full_attention" for i in range(layers)]
    dense = {*config.get("mlp_only_layers", [])} | {
        i for i in range(layers) if (i + 1) % config.get("decoder_sparse_step", 1)
    }

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (hidden,)} | ({f"{name}.bias": (hidden,)} if biased else {})

    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), **norm("model.norm")}
    for layer, kind in enumerate(config.get("layer_types") or usual):
        name = f"model.layers.{layer}"
        shapes |= (_lightning if kind == "linear_attention" else _attention)(f"{name}.self_attn", config)
        shapes |= (
            _swiglu(f"{name}.mlp", hidden, config["intermediate_size"])
            if cohere or layer in dense
            else _experts(name, config)
        )
        for place in ("input",) if cohere else ("input", "post_attention"):
            shapes |= norm(f"{name}.{place}_layernorm")
    head = _linear("lm_head", config["vocab_size"], hidden, config.get("lm_head_bias", False))
    return shapes | ({} if config["tie_word_embeddings"] else head)
