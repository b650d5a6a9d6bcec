"""Names and shapes of later families' tensors: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _layer_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _mlp(
    name: str,
    hidden: int,
    ffn: int,
    bias: bool = False,
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:
    *ups, down = parts
    shapes = _linear(f"{name}.{down}", hidden, ffn, bias)
    for up in ups:
        shapes |= _linear(f"{name}.{up}", ffn, hidden, bias)
    return shapes


def llama_like(config: dict[str, Any]) -> Shapes:
    """GLM-4.5, MiniMax-M2, EXAONE 4, ERNIE 4.5 and Nemotron."""
    family, hidden, heads, ffn = (
        config[n] for n in ("model_type", "hidden_size", "num_attention_heads", "intermediate_size")
    )
    dim, bias = config.get("head_dim") or hidden // heads, config.get("use_bias", False)
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    norm = _layer_norm if family == "nemotron" else (lambda name, size: {f"{name}.weight": (size,)})
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        **norm("model.norm", hidden),
    }
    names = ("post_attention", "post_feedforward") if family == "exaone4" else ("input", "post_attention")
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            shapes |= _linear(
                f"{name}.self_attn.{part}_proj", size, hidden, bias or config.get("attention_bias", False)
            )
        shapes |= _linear(f"{name}.self_attn.o_proj", hidden, q, bias)
        if family in ("exaone4", "glm4_moe"):
            shapes |= {f"{name}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
        if family == "minimax_m2":
            shapes |= {f"{name}.self_attn.q_norm.weight": (q,), f"{name}.self_attn.k_norm.weight": (kv,)}
        experts = _experts(name, config) if family == "minimax_m2" or layer else {}
        parts = ("up_proj", "down_proj") if family == "nemotron" else ("gate_proj", "up_proj", "down_proj")
        shapes |= experts or _mlp(f"{name}.mlp", hidden, ffn, bias or config.get("mlp_bias", False), parts)
        for place in names:
            shapes |= norm(f"{name}.{place}_layernorm", hidden)
    return shapes | (
        {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], hidden)}
    )


def _experts(name: str, config: dict[str, Any]) -> Shapes:
    """Of layers that have them, in these families all but the first one."""
    hidden, ffn = config["hidden_size"], config.get("moe_intermediate_size")
    count = {name: config.get(name) for name in ("n_routed_experts", "num_local_experts", "moe_num_experts")}
    experts = next((number for number in count.values() if number), 0)
    if not experts:
        return {}
    module, parts = f"{name}.mlp", ("gate_proj", "up_proj", "down_proj")
    corrections = {
        "glm4_moe": "gate.e_score_correction_bias",
        "ernie4_5_moe": "moe_statics.e_score_correction_bias",
    }
    correction, shape = corrections.get(config["model_type"], "e_score_correction_bias"), (experts,)
    if config["model_type"] == "minimax_m2":
        module, parts, ffn = f"{name}.block_sparse_moe", ("w1", "w3", "w2"), config["intermediate_size"]
    if config["model_type"] == "ernie4_5_moe":
        shape = (1, experts)
    shapes: Shapes = {f"{module}.gate.weight": (experts, hidden), f"{module}.{correction}": shape}
    for expert in range(experts):
        shapes |= _mlp(f"{module}.experts.{expert}", hidden, ffn, parts=parts)
    if shared := config.get("n_shared_experts") or config.get("moe_num_shared_experts"):
        shapes |= _mlp(f"{module}.shared_experts", hidden, ffn * shared)
    return shapes


def gptj(config: dict[str, Any]) -> Shapes:
    hidden, table = config["n_embd"], (config["vocab_size"], config["n_embd"])
    ffn = config["n_inner"] or 4 * hidden
    shapes: Shapes = {"transformer.wte.weight": table, **_layer_norm("transformer.ln_f", hidden)}
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}"
        for part in ("q", "k", "v", "out"):
            shapes |= _linear(f"{name}.attn.{part}_proj", hidden, hidden)
        shapes |= _linear(f"{name}.mlp.fc_in", ffn, hidden, True) | _linear(
            f"{name}.mlp.fc_out", hidden, ffn, True
        )
        shapes |= _layer_norm(f"{name}.ln_1", hidden)
    return shapes | _linear("lm_head", *table, True)


def bloom(config: dict[str, Any]) -> Shapes:
    hidden = config.get("n_embed") or config["hidden_size"]
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], hidden)}
    for norm in ("word_embeddings_layernorm", "ln_f"):
        shapes |= _layer_norm(f"transformer.{norm}", hidden)
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}"
        shapes |= _linear(f"{name}.self_attention.query_key_value", 3 * hidden, hidden, True)
        shapes |= _linear(f"{name}.self_attention.dense", hidden, hidden, True)
        shapes |= _linear(f"{name}.mlp.dense_h_to_4h", 4 * hidden, hidden, True)
        shapes |= _linear(f"{name}.mlp.dense_4h_to_h", hidden, 4 * hidden, True)
        for norm in ("input", "post_attention"):
            shapes |= _layer_norm(f"{name}.{norm}_layernorm", hidden)
    return shapes | (
        {} if config.get("tie_word_embeddings", True) else _linear("lm_head", config["vocab_size"], hidden)
    )


def llama4(config: dict[str, Any]) -> Shapes:
    hidden, heads, dim, experts, ffn = (
        config[n]
        for n in ("hidden_size", "num_attention_heads", "head_dim", "num_local_experts", "intermediate_size")
    )
    layers, step, kv = (
        config["num_hidden_layers"],
        config.get("interleave_moe_layer_step", 1),
        config["num_key_value_heads"] * dim,
    )
    sparse = config["moe_layers"] or [*range(step - 1, layers, step)]
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, size in (("q", heads * dim), ("k", kv), ("v", kv)):
            shapes |= _linear(f"{name}.self_attn.{part}_proj", size, hidden)
        shapes |= _linear(f"{name}.self_attn.o_proj", hidden, heads * dim)
        if layer in sparse:
            shapes |= _linear(f"{name}.feed_forward.router", experts, hidden) | _mlp(
                f"{name}.feed_forward.shared_expert", hidden, ffn
            )
            shapes[f"{name}.feed_forward.experts.gate_up_proj"] = experts, hidden, 2 * ffn
            shapes[f"{name}.feed_forward.experts.down_proj"] = experts, ffn, hidden
        else:
            shapes |= _mlp(f"{name}.feed_forward", hidden, config["intermediate_size_mlp"])
        shapes |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    return shapes | _linear("lm_head", config["vocab_size"], hidden)


def llama4_images(config: dict[str, Any]) -> Shapes:
    named = {f"language_model.{name}": shape for name, shape in llama4(config["text_config"]).items()}
    return named | {"vision_model.class_embedding": (32,), "multi_modal_projector.linear_1.weight": (64, 32)}


def lfm2(config: dict[str, Any]) -> Shapes:
    hidden, heads, multiple = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["block_multiple_of"],
    )
    dim, kv = hidden // heads, config["num_key_value_heads"] * hidden // heads
    ffn = (
        -(-int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3)) // multiple)
        * multiple
    )
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.embedding_norm.weight": (hidden,),
    }
    for layer, kind in enumerate(config["layer_types"]):
        name = f"model.layers.{layer}"
        if kind == "conv":
            shapes |= _linear(f"{name}.conv.in_proj", 3 * hidden, hidden) | _linear(
                f"{name}.conv.out_proj", hidden, hidden
            )
            shapes[f"{name}.conv.conv.weight"] = hidden, 1, config["conv_L_cache"]
        else:
            for part, size in (("q", hidden), ("k", kv), ("v", kv), ("out", hidden)):
                shapes |= _linear(f"{name}.self_attn.{part}_proj", size, hidden)
            shapes |= {f"{name}.self_attn.{part}_layernorm.weight": (dim,) for part in "qk"}
        shapes |= _mlp(f"{name}.feed_forward", hidden, ffn, parts=("w1", "w3", "w2"))
        shapes |= {f"{name}.{norm}_norm.weight": (hidden,) for norm in ("operator", "ffn")}
    return shapes | (
        {} if config["tie_word_embeddings"] else _linear("lm_head", config["vocab_size"], hidden)
    )
