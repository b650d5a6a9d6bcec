"""Shared code of the readers of config.json: names and defaults of Llama-like models, rotary embedding,
sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig, RopeScaling, Rotary
from jengine.models.family import Fields
from jengine.models.rope import rope as rope_of
from jengine.models.rope import yarn_magnitude
from pallas_kernels.elementwise.activations import ACTIVATIONS

ROPE_OPTIONS = (
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate",
)  # fmt: skip
# Other fields that rope scaling may have: read below, or without effect on results.
ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor",
    "short_factor", "long_factor", "finetuned", "mrope_section", "mrope_interleaved",
}  # fmt: skip
ROPE_NEUTRAL = {"attn_factor": 1, "extrapolation_factor": 1}  # values that have no effect
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position",
)  # fmt: skip
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 1024
MAX_HEAD = 1 << 16
ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")


def decoder(hf: Fields, rope_parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """ModelConfig's fields with the names and defaults of Llama-like models. rope_parameters: None reads them
    from the fields.
    """
    heads = int(hf["num_attention_heads"])
    if rope_parameters is None:
        rope_parameters = rope_fields(hf)
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
        "rope": rope(hf, rope_parameters),
    }


def rope_fields(hf: Fields) -> dict[str, Any]:
    """The parameters of rotary embedding, under the newer or the older field name."""
    newer, older = hf.get("rope_parameters"), hf.get("rope_scaling")
    return dict(newer or older or {})


def rope(hf: Fields, parameters: dict[str, Any]) -> Rotary:
    """Rotary embedding of all channels in all layers.

    Raises:
        ModelError: a kind or a parameter is not supported.
    """
    older = hf.get("rope_theta")
    theta = float(parameters.get("rope_theta") or older or 10000.0)
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError("partial_rotary_factor is not supported")
    sections: Any = {
        "sections": tuple(int(size) for size in parameters.get("mrope_section") or ()),
        "interleaved": bool(parameters.get("mrope_interleaved", False)),
    }
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("default", "mrope"):
        return Rotary(theta=theta, **sections)
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    longest = int(hf.get("max_position_embeddings", 2048))
    original = int(
        hf.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or longest
    )
    parameters = dict(parameters)
    attn_factor = parameters.pop("attn_factor", None) if kind == "yarn" else None
    extra = {name: parameters[name] for name in ROPE_OPTIONS if parameters.get(name) is not None}
    for name, value in parameters.items():
        if value not in (None, ROPE_NEUTRAL.get(name)) and name not in (*ROPE_FIELDS, *ROPE_OPTIONS):
            raise ModelError(f"rope scaling has {name}={value!r}, which is not supported")
    if kind == "longrope":
        extra |= {name: tuple(float(x) for x in parameters[name]) for name in ("short_factor", "long_factor")}
        parameters = {"factor": longest / original, **parameters}
    scaling = RopeScaling(
        kind=kind, factor=float(parameters["factor"]), original_max_position=original, **extra
    )
    if attn_factor is not None and scaling.attention_factor is None:
        scaling = replace(scaling, attention_factor=float(attn_factor) * yarn_magnitude(scaling))
    return Rotary(theta=theta, scaling=scaling, **sections)


def rope_by_layer_types(
    hf: Fields, theta: float, local_theta: float | None = None
) -> tuple[dict[str, Any], float]:
    """Rotary embedding of a model whose layers with a window have a separate one without scaling.

    Args:
        theta, local_theta: defaults for missing fields. Without local_theta, rope_parameters may also be
            those of all layers, whose theta is the same.

    Returns:
        The parameters of layers without a window, and the theta of layers with one.

    Raises:
        ModelError: layers with a window have scaling, or rope_parameters lacks both types of layers.
    """
    ropes = hf.get("rope_parameters") or {}
    if ropes and not ropes.keys() & {"full_attention", "sliding_attention"}:
        if local_theta is not None:
            raise ModelError("rope_parameters must have full_attention and sliding_attention")
        ropes = {"full_attention": ropes, "sliding_attention": {"rope_theta": ropes.get("rope_theta")}}
    full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ModelError(f"rope scaling {local['rope_type']!r} of sliding_attention is not supported")
    everywhere = {"rope_theta": hf.get("rope_theta") or theta, **full, **(hf.get("rope_scaling") or {})}
    return everywhere, float(local.get("rope_theta") or local_theta or theta)


def partly_rotated(hf: Fields, share: float, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """`decoder` for a family in which a share of each head's channels rotates. `share` is the default for a
    missing field.
    """
    parameters = rope_fields(hf) if parameters is None else dict(parameters)
    inner, outer = parameters.pop("partial_rotary_factor", None), hf.get("partial_rotary_factor")
    share = float(inner or outer or share)  # as in transformers, if they differ
    fields = decoder(hf, parameters)
    if share == 1.0:
        return fields
    return {**fields, "rope": replace(fields["rope"], dim=int(fields["head_dim"] * share))}


def interleaved(fields: dict[str, Any], usual: tuple[int, int, int]) -> dict[str, Any]:
    """`decoder`'s fields for a family in which frequencies always take a position's three numbers in turn.

    Args:
        usual: the default of mrope_section, if as many channels rotate.
    """
    rotary: Rotary = fields["rope"]
    fits = sum(usual) == (rotary.dim or fields["head_dim"]) // 2
    sections = rotary.sections or (usual if fits else ())
    return {**fields, "rope": replace(rotary, sections=sections, interleaved=bool(sections))}


def attention_biases(hf: Fields) -> dict[str, Any]:
    """Fields for biases in all products of attention, or in none."""
    bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


def window_everywhere(hf: Fields, window: int | None) -> dict[str, Any]:
    return {"windows": () if window is None else (int(window),) * int(hf["num_hidden_layers"])}


def windows_by_layer_types(hf: Fields, window: int | None, types: list[str]) -> dict[str, Any]:
    """Windows for layers with sliding_attention in the configuration's layer_types, or in `types` if it has
    none.
    """
    types = hf.get("layer_types") or types
    check_kinds(types, "full_attention", "sliding_attention")
    if window is None or "sliding_attention" not in types:
        return {}
    return {"windows": tuple(int(window) if kind == "sliding_attention" else None for kind in types)}


def check_kinds(types: Sequence[str], *known: str) -> None:
    """Raises ModelError for a type of layers that is none of these."""
    if unknown := {*types} - {*known}:
        raise ModelError(f"layer_types has {unknown.pop()!r}; {' and '.join(known)} are supported")


def check_mixed(
    types: Sequence[str],
    layers: int,
    *known: str,
    both: str = "some have full and some linear attention",
    field: str = "layer_types",
) -> None:
    """Raises ModelError unless each layer has one of these types, and both types occur."""
    check_kinds(types, *known)
    if len(types) != layers or len({*types}) < 2:
        raise ModelError(f"{field} must name {layers} layers, num_hidden_layers, of which {both}")


def check_shared_layers(hf: Fields, types: list[str]) -> int:
    """The number of final layers that read the keys and values of earlier layers.

    Raises:
        ModelError: no earlier layer has the type of one of the final layers.
    """
    shared = int(hf.get("num_kv_shared_layers") or 0)
    if shared and (left := {*types} - {*types[:-shared]}):
        raise ModelError(f"num_kv_shared_layers={shared} leaves no other layer with {left.pop()}")
    return shared


def full_attention_every(layers: int, pattern: int) -> list[str]:
    """Layer types with full attention in every pattern-th layer."""
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


def windows_but_every(hf: Fields, window: int | None, pattern: int) -> dict[str, Any]:
    """Windows for all layers but every pattern-th, or as layer_types says."""
    return windows_by_layer_types(hf, window, full_attention_every(int(hf["num_hidden_layers"]), pattern))


def rotated_in_windows(fields: dict[str, Any], windows: dict[str, Any]) -> dict[str, Any]:
    """`fields` with these windows. Layers without a window do not rotate."""
    layers = fields["num_layers"]
    seen = windows.get("windows", (None,) * layers)
    unrotated = tuple(i for i in range(layers) if seen[i] is None)
    return {**fields, **windows, "rope": replace(fields["rope"], unrotated=unrotated)}


def check(config: ModelConfig) -> None:
    """
    Raises:
        ModelError: a size is not possible, or contradicts another.
    """
    for name in SIZES:
        if not 1 <= getattr(config, name) <= MAX_SIZE:
            raise ModelError(f"{name}={getattr(config, name)} must be at least 1 and at most {MAX_SIZE}")
    if config.num_layers > MAX_LAYERS:
        raise ModelError(f"num_layers={config.num_layers} must be at most {MAX_LAYERS}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"num_attention_heads={config.num_heads} is not a multiple of"
            f" num_key_value_heads={config.num_kv_heads}"
        )
    if config.activation not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ModelError(f"hidden_act {config.activation!r} is not supported; {known} are")
    rotary, scaling = config.rope.dim or config.head_dim, config.rope.scaling
    if not 0 < rotary <= MAX_HEAD:
        raise ModelError(f"{rotary} channels of a head rotate; at most {MAX_HEAD} can")
    if rotary % 2:
        raise ModelError(f"head_dim={rotary} must be even, for rotary embedding")
    sections = config.rope.sections
    if sections and (len(sections) != 3 or sum(sections) != rotary // 2):
        raise ModelError(
            f"mrope_section={list(sections)} must be three numbers whose sum is {rotary // 2}, half of the"
            " channels that rotate"
        )
    if scaling is not None and scaling.kind == "longrope":
        for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != rotary // 2:
                raise ModelError(
                    f"{name} has {len(factors)} numbers; {rotary} channels rotate and need {rotary // 2}"
                )
    rope_of(config, config.max_position)  # raises if a number of the scaling is impossible
    if any(window is not None and window < 1 for window in config.windows):
        raise ModelError(
            f"sliding_window={min(w for w in config.windows if w is not None)} must be at least 1"
        )
    if config.windows and len(config.windows) != config.num_layers:
        raise ModelError(
            f"layer_types has {len(config.windows)} layers, num_hidden_layers is {config.num_layers}"
        )
