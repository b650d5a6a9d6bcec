"""Reads a Hugging Face config.json into a ModelConfig, one function a family. Defaults are those of transformers.

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
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_norm_elementwise_affine": True,
    "layer_types": None,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "scale_attn_by_inverse_layer_idx": False,
    "sliding_window": None,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
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
    hf = Content(fields)
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


# What families share.


def _decoder(hf: Content, *, theta: float = 10000.0) -> dict[str, Any]:
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
        **_rope(hf, hf.get("rope_parameters") or hf.get("rope_scaling") or {}, theta),
    }


def _rope(hf: Content, rope: dict[str, Any], theta: float) -> dict[str, Any]:
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or theta)
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError("partial_rotary_factor is not supported")
    kind: Any = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    longest = int(hf.get("max_position_embeddings", 2048))
    original = int(hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest)
    optional = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
    given = {name: rope[name] for name in optional if rope.get(name) is not None}
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
    return {**_decoder(hf), **_everywhere(hf, hf.get("sliding_window", 4096))}


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


READERS: dict[str, Callable[[Content], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
