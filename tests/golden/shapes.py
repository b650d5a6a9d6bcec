"""Names and shapes of the tensors in Hugging Face's checkpoints, written independently of jengine's
declarations.
"""

from __future__ import annotations

from typing import Any

from tests.golden import further_shapes, later_shapes
from tests.golden.expert_shapes import deepseek, gpt_oss
from tests.golden.gemma_shapes import gemma3n, gemma4, gemma_images
from tests.golden.more_shapes import fused, llama_like, with_images, with_layer_norm
from tests.golden.state_shapes import qwen3_5, qwen3_next

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Every tensor of a checkpoint with this configuration."""
    return MAKERS.get(config["model_type"], _llama)(config)


def _llama(config: dict[str, Any]) -> Shapes:
    family, hidden, ffn, heads = (
        config["model_type"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    dim = config.get("head_dim") or hidden // heads
    q, kv, table = heads * dim, config["num_key_value_heads"] * dim, (config["vocab_size"], hidden)
    projections = {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, ffn)}
    if family == "phi3":
        projections |= {"self_attn.qkv_proj": (q + 2 * kv, hidden), "mlp.gate_up_proj": (2 * ffn, hidden)}
    else:
        projections |= {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
        }
        projections |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    biased = {"self_attn": config.get("attention_bias"), "mlp": config.get("mlp_bias")}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family.startswith("gemma"):
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        experts = _experts(config, layer)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in experts.items()}
        for name, shape in projections.items():
            if experts and name.startswith("mlp"):
                continue
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if biased[name.split(".")[0]] or (
                family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj")
            ):
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    return shapes


def _experts(config: dict[str, Any], layer: int) -> Shapes:
    hidden, count = config["hidden_size"], config.get("num_local_experts") or config.get("num_experts") or 0
    if not count or layer in config.get("mlp_only_layers", []):
        return {}
    if config["model_type"] == "mixtral":
        module, (gate, up, down), ffn = "block_sparse_moe", ("w1", "w3", "w2"), config["intermediate_size"]
    else:
        module, (gate, up, down), ffn = (
            "mlp",
            ("gate_proj", "up_proj", "down_proj"),
            config["moe_intermediate_size"],
        )
    shapes: Shapes = {f"{module}.gate": (count, hidden)}
    for expert in range(count):
        shapes |= {f"{module}.experts.{expert}.{part}": (ffn, hidden) for part in (gate, up)}
        shapes[f"{module}.experts.{expert}.{down}"] = (hidden, ffn)
    return shapes


def _gpt2(config: dict[str, Any]) -> Shapes:
    hidden, ffn = config["n_embd"], config["n_inner"]
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    products = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
    }
    for layer in range(config["n_layer"]):
        for name, shape in products.items():
            shapes |= _with_bias(f"transformer.h.{layer}.{name}", shape, shape[1])
        for name in ("ln_1", "ln_2"):
            shapes |= _with_bias(f"transformer.h.{layer}.{name}", (hidden,), hidden)
    return {**shapes, **_with_bias("transformer.ln_f", (hidden,), hidden)}


def _opt(config: dict[str, Any]) -> Shapes:
    hidden, ffn, size = (
        config["hidden_size"],
        config["ffn_dim"],
        config.get("word_embed_proj_dim") or config["hidden_size"],
    )
    shapes: Shapes = {
        "model.decoder.embed_tokens.weight": (config["vocab_size"], size),
        "model.decoder.embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
    }
    if size != hidden:
        shapes |= {
            "model.decoder.project_in.weight": (hidden, size),
            "model.decoder.project_out.weight": (size, hidden),
        }
    products = {f"self_attn.{p}_proj": (hidden, hidden) for p in ("q", "k", "v", "out")} | {
        "fc1": (ffn, hidden),
        "fc2": (hidden, ffn),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in products.items():
            shapes |= _with_bias(f"model.decoder.layers.{layer}.{name}", shape, shape[0])
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= _with_bias(f"model.decoder.layers.{layer}.{name}", (hidden,), hidden)
    if config.get("do_layer_norm_before", True):
        shapes |= _with_bias("model.decoder.final_layer_norm", (hidden,), hidden)
    return shapes


def _with_bias(name: str, shape: tuple[int, ...], outputs: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": (outputs,)}


MAKERS = {
    **{"gpt2": _gpt2, "opt": _opt},
    **dict.fromkeys(
        ("smollm3", "olmo2", "olmo3", "granite", "glm", "glm4", "gemma", "ministral3"), llama_like
    ),
    **dict.fromkeys(("starcoder2", "stablelm", "phi"), with_layer_norm),
    **dict.fromkeys(("gpt_neox", "falcon"), fused),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen3_next),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), qwen3_5),
    **dict.fromkeys(("gemma3", "mistral3"), with_images),
    **dict.fromkeys(
        ("glm4_moe", "minimax_m2", "exaone4", "ernie4_5", "ernie4_5_moe", "nemotron"),
        further_shapes.llama_like,
    ),
    **dict.fromkeys(
        ("cohere", "cohere2", "granitemoe", "olmoe", "phimoe", "qwen2_moe"), later_shapes.llama_like
    ),
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), later_shapes.llama_like),
    **{"gptj": further_shapes.gptj, "bloom": further_shapes.bloom},
    **{
        "lfm2": further_shapes.lfm2,
        "llama4": further_shapes.llama4_images,
        "llama4_text": further_shapes.llama4,
    },
    "gpt_oss": gpt_oss,
    **{"gemma4": gemma_images, "gemma4_text": gemma4, "gemma3n": gemma_images, "gemma3n_text": gemma3n},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), deepseek),
}
