"""Reads a Hugging Face config.json into a ModelConfig, one function a family.

A field that changes what a model computes, and that its family's function does not read, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jengine.config import ModelConfig, RopeScaling
from jengine.errors import ModelError

UNLESS_READ: dict[str, object] = {  # the value that asks for nothing, as null does
    "_remove_final_layer_norm": False,
    "add_cross_attention": False,
    "attention_bias": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "layer_norm_elementwise_affine": True,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "residual_multiplier": 1.0,
    "scale_attn_by_inverse_layer_idx": False,
    "sliding_window": None,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}
_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers takes for absent fields, where families differ
    "gemma2": {**_GEMMA, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**_GEMMA, "max_position_embeddings": 131072},
    "gpt2": {"tie_word_embeddings": True},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "opt": {"tie_word_embeddings": True},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
}
ROPE_OPTIONS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
ROPE_FIELDS = {  # what else a stretched rope may have: read below, or without effect on what is computed
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("short_factor", "long_factor", "finetuned"),
}
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")
AT_LEAST_ONE = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")


class Content(dict[str, Any]):
    """A config.json's fields; remembers which were read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


def model_config(fields: dict[str, Any], file: object = "config.json") -> ModelConfig:
    """A ModelConfig from the content of a config.json.

    Raises:
        ModelError: a field is missing, wrong, contradicts another, or asks for what is not supported.
    """
    hf = Content({**DEFAULTS.get(str(fields.get("model_type")), {}), **fields})
    try:
        family = str(hf["model_type"])
        if family not in READERS:
            raise ModelError(f"model_type {family!r} is not supported; {', '.join(sorted(READERS))} are", file=file)
        eos = hf.get("eos_token_id")
        config = ModelConfig(
            family=family,
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            **READERS[family](hf),
        )
    except KeyError as missing:
        raise ModelError(f"field {missing} is missing", file=file) from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as wrong:
        raise ModelError(f"a field has the wrong type or value: {wrong}", file=file) from None
    except ModelError as refused:
        raise ModelError(refused.reason, file=file) from None
    _check(config, file)
    if "layer_types" not in hf.seen and hf.get("layer_types") not in (None, _layer_types(config)):
        raise ModelError(f"layer_types is not supported, unless it says what {family} does: {_layer_types(config)}", file=file)
    for name, neutral in UNLESS_READ.items():
        if name not in hf.seen and hf.get(name) not in (None, neutral):
            raise ModelError(f"{name} is not supported", file=file)
    return config


def _check(config: ModelConfig, file: object) -> None:
    for name in AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ModelError(f"{name}={getattr(config, name)} must be at least 1", file=file)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"num_attention_heads={config.num_heads} is no multiple of num_key_value_heads={config.num_kv_heads}", file=file)
    rotary, scaling = config.rotary_dim or config.head_dim, config.rope_scaling
    if rotary % 2:
        raise ModelError(f"head_dim={rotary} must be even, for rotary embedding", file=file)
    if scaling is not None and scaling.kind == "longrope":
        for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != rotary // 2:
                raise ModelError(f"{name} has {len(factors)} numbers; {rotary} channels rotate and need {rotary // 2}", file=file)
    if any(window is not None and window < 1 for window in config.windows):
        raise ModelError(f"sliding_window={min(w for w in config.windows if w is not None)} must be at least 1", file=file)
    if config.windows and len(config.windows) != config.num_layers:
        raise ModelError(f"layer_types has {len(config.windows)} layers, num_hidden_layers is {config.num_layers}", file=file)
    if config.expert_layers and not 1 <= config.experts_per_token <= config.num_experts:
        raise ModelError(f"num_experts_per_tok={config.experts_per_token} must be from 1 to {config.num_experts}, the experts", file=file)


def _layer_types(config: ModelConfig) -> list[str]:
    """As config.json would have them."""
    return ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(config.num_layers)]


# What families share.


def _decoder(hf: Content) -> dict[str, Any]:
    """Names and defaults that Llama's descendants have in common."""
    heads = int(hf["num_attention_heads"])
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": int(hf["hidden_size"]),
        "intermediate_size": int(hf["intermediate_size"]),
        "num_layers": int(hf["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
        "head_dim": int(hf.get("head_dim") or hf["hidden_size"] // heads),
        "max_position": int(hf.get("max_position_embeddings", 2048)),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "activation": hf.get("hidden_act", "silu"),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        **_rope(hf, hf.get("rope_parameters") or hf.get("rope_scaling") or {}),
    }


def _rope(hf: Content, rope: dict[str, Any]) -> dict[str, Any]:
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError("partial_rotary_factor is not supported")
    kind: Any = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    longest = int(hf.get("max_position_embeddings", 2048))
    original = int(hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest)
    given = {name: rope[name] for name in ROPE_OPTIONS if rope.get(name) is not None}
    for name, value in rope.items():
        if value is not None and name not in ROPE_FIELDS and name not in ROPE_OPTIONS:
            raise ModelError(f"rope scaling has {name}={value!r}, which is not supported")
    if kind == "longrope":
        given |= {name: tuple(float(x) for x in rope[name]) for name in ("short_factor", "long_factor")}
        rope = {"factor": longest / original, **rope}
    return {
        "rope_theta": theta,
        "rope_scaling": RopeScaling(kind=kind, factor=float(rope["factor"]), original_max_position=original, **given),
    }


def _biases(hf: Content) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


def _everywhere(hf: Content, window: int | None) -> dict[str, Any]:
    return {"windows": () if window is None else (int(window),) * int(hf["num_hidden_layers"])}


def _by_layer_types(hf: Content, window: int | None, types: list[str]) -> dict[str, Any]:
    """Windows where the configuration's layer_types, or else `types`, have sliding_attention."""
    types = hf.get("layer_types") or types
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer_types has {unknown.pop()!r}; full_attention and sliding_attention are supported")
    if window is None or "sliding_attention" not in types:
        return {}
    return {"windows": tuple(int(window) if kind == "sliding_attention" else None for kind in types)}


def _every(layers: int, pattern: int) -> list[str]:
    """Layer types with full attention in every pattern-th layer."""
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


# One function a family.


def _llama(hf: Content) -> dict[str, Any]:
    return {**_decoder(hf), **_biases(hf), "mlp_bias": bool(hf.get("mlp_bias", False))}


def _mistral(hf: Content) -> dict[str, Any]:
    return {**_decoder(hf), **_everywhere(hf, hf.get("sliding_window"))}


def _qwen_windows(hf: Content) -> dict[str, Any]:
    layers, first = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    window = hf.get("sliding_window", 4096)  # present in many configurations that do not use it
    types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return _by_layer_types(hf, window if hf.get("use_sliding_window") else None, types)


def _qwen2(hf: Content) -> dict[str, Any]:
    return {**_decoder(hf), **_qwen_windows(hf), "qkv_bias": True}


def _qwen3(hf: Content) -> dict[str, Any]:
    return {**_decoder(hf), **_qwen_windows(hf), **_biases(hf)}


def _phi3(hf: Content) -> dict[str, Any]:
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    share = float(rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0)
    if "short_factor" in rope:  # "su" and "yarn" are earlier names of it
        rope["rope_type"] = "longrope"
    hf["rope_parameters"] = rope
    fields = {**_decoder(hf), **_everywhere(hf, hf.get("sliding_window"))}
    return {**fields, "rotary_dim": None if share == 1.0 else int(fields["head_dim"] * share)}


def _gemma(hf: Content) -> dict[str, Any]:
    return {
        **_decoder(hf),
        **_biases(hf),
        "activation": hf["hidden_activation"],
        "attention_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "logit_soft_cap": hf.get("final_logit_softcapping"),
        "norm_offset": 1.0,
    }


def _gemma2(hf: Content) -> dict[str, Any]:
    windows = _by_layer_types(hf, hf["sliding_window"], _every(int(hf["num_hidden_layers"]), 2))
    return {**_gemma(hf), **windows, "attention_soft_cap": hf.get("attn_logit_softcapping")}


def _gemma3(hf: Content) -> dict[str, Any]:
    pattern = int(hf.get("sliding_window_pattern") or 6)
    windows = _by_layer_types(hf, hf["sliding_window"], _every(int(hf["num_hidden_layers"]), pattern))
    ropes = hf.get("rope_parameters") or {}
    full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ModelError(f"rope scaling {local['rope_type']!r} of sliding_attention is not supported")
    hf["rope_parameters"] = {"rope_theta": hf.get("rope_theta") or 1e6, **full, **(hf.get("rope_scaling") or {})}
    local_theta = local.get("rope_theta") or hf.get("rope_local_base_freq") or 10000.0
    return {**_gemma(hf), **windows, "local_rope_theta": float(local_theta)}


def _gpt2(hf: Content) -> dict[str, Any]:
    heads, hidden = int(hf["n_head"]), int(hf["n_embd"])
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(hf.get("n_inner") or 4 * hidden),
        "num_layers": int(hf["n_layer"]),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_position": int(hf["n_positions"]),
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "activation": hf.get("activation_function", "gelu_new"),
        "attention_scale": None if hf.get("scale_attn_weights", True) else 1.0,
        "tie_embeddings": bool(hf["tie_word_embeddings"]),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
    }


def _opt(hf: Content) -> dict[str, Any]:
    heads, hidden = int(hf["num_attention_heads"]), int(hf["hidden_size"])
    return {
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(hf["ffn_dim"]),
        "num_layers": int(hf["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_position": int(hf.get("max_position_embeddings", 2048)),
        "norm_eps": 1e-5,
        "pre_norm": bool(hf.get("do_layer_norm_before", True)),
        "activation": hf.get("activation_function", "relu"),
        "embedding_size": int(hf.get("word_embed_proj_dim") or hidden),
        "tie_embeddings": bool(hf["tie_word_embeddings"]),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(hf.get("enable_bias", True))),
    }


def _mixtral(hf: Content) -> dict[str, Any]:
    fields = {**_decoder(hf), **_everywhere(hf, hf.get("sliding_window"))}
    return {
        **fields,
        "expert_layers": tuple(range(fields["num_layers"])),
        "num_experts": int(hf.get("num_local_experts") or hf.get("num_experts", 8)),
        "experts_per_token": int(hf.get("num_experts_per_tok", 2)),
        "expert_size": fields["intermediate_size"],
        "normalize_experts": True,
    }


def _qwen3_moe(hf: Content) -> dict[str, Any]:
    window = hf.get("sliding_window", 4096)
    fields = {**_decoder(hf), **_biases(hf), **_everywhere(hf, window if hf.get("use_sliding_window") else None)}
    dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
    return {
        **fields,
        "expert_layers": tuple(i for i in range(fields["num_layers"]) if i not in dense and (i + 1) % step == 0),
        "num_experts": int(hf.get("num_experts") or hf.get("num_local_experts", 128)),
        "experts_per_token": int(hf.get("num_experts_per_tok", 8)),
        "expert_size": int(hf.get("moe_intermediate_size", 768)),
        "normalize_experts": bool(hf.get("norm_topk_prob", False)),
    }


READERS: dict[str, Callable[[Content], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
