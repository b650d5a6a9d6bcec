"""Names and shapes of further families' tensors: see shapes.py."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _layer_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def llama_like(config: dict[str, Any]) -> Shapes:
    """SmolLM3, OLMo 2 and 3, Granite, GLM-4, Gemma, Mistral."""
    family, hidden, ffn, heads = (
        config["model_type"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    bias, glm, olmo = config.get("attention_bias", False), family.startswith("glm"), family.startswith("olmo")
    norms = ["post_attention_layernorm"]
    norms += [] if olmo else ["input_layernorm"]
    norms += ["post_feedforward_layernorm"] if olmo or family == "gemma3_text" else []
    norms += ["pre_feedforward_layernorm"] if family == "gemma3_text" else []
    norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] if family == "glm4" else []
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            shapes |= _linear(f"{name}.self_attn.{part}_proj", size, hidden, bias)
        shapes |= _linear(f"{name}.self_attn.o_proj", hidden, q, bias and not glm)
        for part, size in {"gate_up": 2 * ffn}.items() if glm else {"gate": ffn, "up": ffn}.items():
            shapes |= _linear(f"{name}.mlp.{part}_proj", size, hidden, config.get("mlp_bias", False))
        shapes |= _linear(f"{name}.mlp.down_proj", hidden, ffn, config.get("mlp_bias", False))
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in norms}
        if olmo:
            shapes |= {f"{name}.self_attn.q_norm.weight": (q,), f"{name}.self_attn.k_norm.weight": (kv,)}
        if family == "gemma3_text":
            shapes |= {f"{name}.self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    return shapes | (
        {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], hidden)}
    )


def with_layer_norm(config: dict[str, Any]) -> Shapes:
    """StarCoder2, StableLM and Phi."""
    family, hidden, ffn, heads = (
        config["model_type"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    kv_heads, dim, phi = config["num_key_value_heads"], hidden // heads, family == "phi"
    every = phi or config.get("use_bias", False)
    products = {
        "starcoder2": {"c_fc": (ffn, hidden), "c_proj": (hidden, ffn)},
        "stablelm": {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)},
        "phi": {"fc1": (ffn, hidden), "fc2": (hidden, ffn)},
    }[family]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    shapes |= _layer_norm("model.final_layernorm" if phi else "model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, size in (("q", hidden), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            shapes |= _linear(
                f"{name}.self_attn.{part}_proj", size, hidden, every or config.get("use_qkv_bias", False)
            )
        shapes |= _linear(f"{name}.self_attn.{'dense' if phi else 'o_proj'}", hidden, hidden, every)
        for part, (outputs, inputs) in products.items():
            shapes |= _linear(f"{name}.mlp.{part}", outputs, inputs, every)
        shapes |= _layer_norm(f"{name}.input_layernorm", hidden)
        if not phi and not config.get("use_parallel_residual"):
            shapes |= _layer_norm(f"{name}.post_attention_layernorm", hidden)
        if config.get("qk_layernorm"):
            shapes |= {f"{name}.self_attn.q_layernorm.norms.{head}.weight": (dim,) for head in range(heads)}
            shapes |= {
                f"{name}.self_attn.k_layernorm.norms.{head}.weight": (dim,) for head in range(kv_heads)
            }
    return shapes | (
        {} if config["tie_word_embeddings"] else _linear("lm_head", config["vocab_size"], hidden, phi)
    )


def fused(config: dict[str, Any]) -> Shapes:
    """GPT-NeoX and Falcon."""
    falcon, hidden, heads = (
        config["model_type"] == "falcon",
        config["hidden_size"],
        config["num_attention_heads"],
    )
    new = config.get("new_decoder_architecture", False)
    kv_heads = config["num_kv_heads"] if new else 1 if config.get("multi_query") else heads
    ffn = (config.get("ffn_hidden_size") or 4 * hidden) if falcon else config["intermediate_size"]
    bias, mlp_bias = (config["bias"],) * 2 if falcon else (config.get("attention_bias", True), True)
    prefix, layers, attention = (
        ("transformer.", "h", "self_attention") if falcon else ("gpt_neox.", "layers", "attention")
    )
    table = (config["vocab_size"], hidden)
    shapes: Shapes = {f"{prefix}{'word_embeddings' if falcon else 'embed_in'}.weight": table}
    shapes |= _layer_norm(f"{prefix}{'ln_f' if falcon else 'final_layer_norm'}", hidden)
    norms = (
        ["input_layernorm"]
        if falcon and config["parallel_attn"]
        else ["input_layernorm", "post_attention_layernorm"]
    )
    if new and config.get("num_ln_in_parallel_attn", 2) == 2:
        norms = ["ln_attn", "ln_mlp"]
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}{layers}.{layer}"
        shapes |= _linear(
            f"{name}.{attention}.query_key_value", (heads + 2 * kv_heads) * hidden // heads, hidden, bias
        )
        shapes |= _linear(f"{name}.{attention}.dense", hidden, hidden, bias)
        shapes |= _linear(f"{name}.mlp.dense_h_to_4h", ffn, hidden, mlp_bias) | _linear(
            f"{name}.mlp.dense_4h_to_h", hidden, ffn, mlp_bias
        )
        for norm in norms:
            shapes |= _layer_norm(f"{name}.{norm}", hidden)
    head = "lm_head.weight" if falcon else "embed_out.weight"
    return shapes | ({} if config["tie_word_embeddings"] else {head: table})


def with_images(config: dict[str, Any]) -> Shapes:
    """A text model's tensors as checkpoints of image models name them, Gemma 3's in the older way, and some
    of the other parts'.
    """
    text, size = llama_like(config["text_config"]), config["vision_config"]["hidden_size"]
    if config["model_type"] == "gemma3":
        parts = {"multi_modal_projector.mm_soft_emb_norm.weight": (size,)} | _layer_norm(
            "vision_tower.vision_model.post_layernorm", size
        )
        return {f"language_model.{name}": shape for name, shape in text.items()} | parts
    named = {name.replace("model.", "model.language_model.", 1): shape for name, shape in text.items()}
    return named | {
        "model.multi_modal_projector.norm.weight": (size,),
        "model.vision_tower.ln_pre.weight": (size,),
    }
