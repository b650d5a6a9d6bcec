"""Gemma 4: other heads in layers without a window, layers that share keys and values, embeddings for each
layer, experts beside an MLP. What Gemma 3n has of it, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig, OutputHead, RopeScaling
from jengine.models.facts import Working
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import (
    attention_biases,
    check_shared_layers,
    decoder,
    full_attention_every,
    rope_by_layer_types,
    windows_by_layer_types,
)
from jengine.models.layers import (
    Attend,
    Attention,
    GatedMlp,
    RMSNorm,
    dense,
    embed,
    param,
    unit,
    vocabulary,
    whole_matrix,
)
from jengine.models.llama import Llama
from jengine.models.moe import Experts, MixtureOfExperts, experts_everywhere, has_experts
from jengine.models.pieces import Part, Piece, qkv_parts
from jengine.models.rope import local_rope, rope
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.activations import ACTIVATIONS
from pallas_kernels.elementwise.rotary import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Heads of layers without a window, if they differ from those of layers with one.

    Attributes:
        keys_as_values: keys and values come from one matrix; their norms differ.
    """

    head_dim: int
    kv_heads: int
    keys_as_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeysValues:
    """The last layers read the keys and values of the last layer before them with the same window.

    Attributes:
        layers: their number.
        wide_mlp: their MLPs are twice as wide.
    """

    layers: int
    wide_mlp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An embedding of each token for each layer, which the layer adds to the residual stream through a gate.

    Attributes:
        size: channels per layer.
        vocab_size: rows of the embedding table, which holds the channels of all layers.
    """

    size: int
    vocab_size: int


def at(config: ModelConfig, layer: int) -> ModelConfig:
    """The configuration with the sizes of one layer."""
    changes: dict[str, Any] = {}
    full, shared = config.find(FullAttention), config.find(SharedKeysValues)
    if full is not None and config.window(layer) is None:
        changes |= {"head_dim": full.head_dim, "num_kv_heads": full.kv_heads}
    if shared is not None and shared.wide_mlp and kv_layer(config, layer) != layer:
        changes |= {"intermediate_size": 2 * config.intermediate_size}
    return dataclasses.replace(config, **changes) if changes else config


def kv_layer(config: ModelConfig, layer: int) -> int:
    """Index of the layer whose keys and values a layer reads: its own, except in those of SharedKeysValues.

    Raises:
        ValueError: no layer before these has the layer's window.
    """
    shared = config.find(SharedKeysValues)
    first = config.num_layers - (0 if shared is None else shared.layers)
    return (
        layer if layer < first else max(i for i in range(first) if config.window(i) == config.window(layer))
    )


def key_value_rows(config: ModelConfig, layer: int) -> int:
    """Number of matrices that a layer has for keys and values: 2, 1 or 0."""
    if kv_layer(config, layer) != layer:
        return 0
    full = config.find(FullAttention)
    return 1 if full is not None and full.keys_as_values and config.window(layer) is None else 2


class Gemma4Attention(Attention):
    """Norms queries, keys and values. Some layers have no matrix for values, which are then made from keys,
    and some for neither.
    """

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> None:
        self.own = key_value_rows(config, index)
        self.reads = kv_layer(config, index)
        sizes = at(config, index)
        super().__init__(sizes, dtype, name)
        self.q_norm = RMSNorm(sizes.head_dim, config, dtype, f"{name}.q_norm")
        self.k_norm = RMSNorm(sizes.head_dim, config, dtype, f"{name}.k_norm") if self.own else None

    def layout(self, config: ModelConfig) -> tuple[int, tuple[Part, ...]]:
        return config.head_dim * (config.group_size_padded + self.own), qkv_parts(config)[: 1 + self.own]

    def options(self, layer: int) -> AttentionOptions:
        """An image's tokens see later ones in layers with a window only."""
        options = super().options(layer)
        return dataclasses.replace(options, causal=options.window is None)

    def normalize(self, qkv: QkvProduct) -> Qkv | QueriesOnly:
        rows, group = qkv.rows, qkv.group
        q = self.q_norm(rows[:, :, :group].reshape(len(rows), -1, rows.shape[-1]))
        if self.k_norm is None:
            return QueriesOnly(q)
        return Qkv(q, self.k_norm(rows[:, :, group]), unit(rows[:, :, -1], self.config.norm_eps))


class Gemma4Experts(Experts):
    """Experts with norms of their own, before the router and before themselves; each has a factor."""

    router_name, stacked = "router.proj", ("experts.gate_up_proj", "experts.down_proj")

    def declare(self, dtype: jax.typing.DTypeLike, name: str) -> None:
        super().declare(dtype, name)
        config, experts, hidden = self.config, self.sizes.count, self.config.hidden_size
        self.router_scale = param((hidden,), dtype, (None,), Piece(f"{name}.router.scale", (hidden,)))
        self.scale = param((experts,), dtype, (None,), Piece(f"{name}.router.per_expert_scale", (experts,)))
        self.norm = RMSNorm(hidden, config, dtype, f"{name}.pre_feedforward_layernorm_2")

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        weights, chosen = super().route(
            unit(x, config.norm_eps) * self.router_scale[...] * jnp.asarray(config.hidden_size**-0.5, x.dtype)
        )
        return weights * self.scale[...].astype(weights.dtype)[chosen], chosen

    def entering(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class LayerInput(nnx.Module):
    """Adds a layer's own embedding of each token to the residual stream, through a gate."""

    def __init__(self, config: ModelConfig, size: int, dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, self.activation = config.hidden_size, config.activation
        self.gate = whole_matrix(f"{name}.per_layer_input_gate.weight", dtype, size, hidden)
        self.projection = whole_matrix(f"{name}.per_layer_projection.weight", dtype, hidden, size)
        self.norm = RMSNorm(hidden, config, dtype, f"{name}.post_per_layer_input_norm")

    def __call__(self, x: jax.Array, inputs: jax.Array) -> jax.Array:
        return self.norm(
            dense(ACTIVATIONS[self.activation](dense(x, self.gate[...])) * inputs, self.projection[...])
        )


class Gemma4Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> None:
        def norm(place: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype, f"{name}.{place}")

        self.attention_norm = norm("input_layernorm")
        self.attention_result_norm = norm("post_attention_layernorm")
        self.attention = Gemma4Attention(config, dtype, f"{name}.self_attn", index)
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp_result_norm = norm("post_feedforward_layernorm")
        self.mlp = GatedMlp(at(config, index), dtype, f"{name}.mlp")
        self.experts = Gemma4Experts(config, dtype, name) if has_experts(config, index) else None
        if self.experts is not None:
            self.mlp_part_norm = norm("post_feedforward_layernorm_1")
            self.experts_part_norm = norm("post_feedforward_layernorm_2")
        self.scale = param((1,), dtype, (None,), Piece(f"{name}.layer_scalar", (1,)))
        inputs = config.find(LayerInputs)
        self.input = None if inputs is None else LayerInput(config, inputs.size, dtype, name)

    def __call__(
        self, layer: int, x: jax.Array, rotation: Rotation, attend: Attend, inputs: jax.Array | None = None
    ) -> jax.Array:
        x = x + self.attention_result_norm(self.attention(layer, self.attention_norm(x), rotation, attend))
        y = self.mlp(self.mlp_norm(x))
        if self.experts is not None:
            y = self.mlp_part_norm(y) + self.experts_part_norm(self.experts(x))
        x = x + self.mlp_result_norm(y)
        if self.input is not None and inputs is not None:
            x = x + self.input(x, inputs)
        return x * self.scale[...]


class Gemma4(Llama):
    gives_states = False

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        self.rope = rope(at(config, config.num_layers - 1), max_model_len)
        self.local_rope = local_rope(config, max_model_len)
        inputs = config.find(LayerInputs)
        if config.find(SharedKeysValues) is not None:
            self.indivisible = "its last layers read the keys and values of earlier ones"
        if inputs is not None:
            self.indivisible = "each of its layers reads an embedding of the tokens"
            self.takes_embeddings = False
            size = config.num_layers * inputs.size
            table = f"{self.prefix}embed_tokens_per_layer.weight"
            projection = f"{self.prefix}per_layer_model_projection.weight"
            self.layer_table = vocabulary(
                dataclasses.replace(config, vocab_size=inputs.vocab_size), size, dtype, table
            )
            self.layer_projection = whole_matrix(projection, dtype, size, config.hidden_size)
            self.layer_norm = RMSNorm(inputs.size, config, dtype, f"{self.prefix}per_layer_projection_norm")

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Any:
        return Gemma4Layer(config, dtype, name, index)

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = self.enter(tokens, positions, attend)
        layers, inputs = range(len(self.layers)), self.layer_inputs(tokens, x)
        return self.leave(self.through(x, positions, attend, layers, inputs=inputs))

    def working(self, tokens: int) -> Working:
        inputs = self.config.find(LayerInputs)
        return Working(channels=0 if inputs is None else 3 * self.config.num_layers * inputs.size)

    def layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """int32[N], and their embeddings [N, hidden] -> [N, layers, size]."""
        inputs = self.config.find(LayerInputs)
        if inputs is None:
            return None
        shape = len(tokens), self.config.num_layers, inputs.size
        listed = jnp.where(tokens < inputs.vocab_size, tokens, 0)
        known = embed(self.layer_table[...], listed).reshape(shape) * jnp.asarray(inputs.size**0.5, x.dtype)
        seen = dense(x, self.layer_projection[...]) * jnp.asarray(self.config.hidden_size**-0.5, x.dtype)
        return (self.layer_norm(seen.reshape(shape)) + known) * jnp.asarray(0.5**0.5, x.dtype)


def read_gemma4(hf: Fields) -> dict[str, Any]:
    """Raises ModelError for an arrangement of layers that is not supported."""
    layers, bidirectional = int(hf["num_hidden_layers"]), hf.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):  # of images' tokens, which a text has none of
        raise ModelError(f"use_bidirectional_attention={bidirectional!r} is not supported")
    types = full_attention_every(layers, 6)
    types = list(hf.get("layer_types") or [*types[:-1], "full_attention"])
    if types[-1] != "full_attention":
        raise ModelError(f"layer_types ends with {types[-1]!r}; full_attention is supported there")
    shared = check_shared_layers(hf, types)
    everywhere, local_theta = rope_by_layer_types(hf, theta=1e6, local_theta=1e4)
    stretched = {**PROPORTIONAL, **everywhere} if not hf.get("rope_parameters") else everywhere
    proportional = stretched.get("rope_type") == "proportional"
    fields = decoder(hf, {"rope_theta": stretched["rope_theta"]} if proportional else stretched)
    if proportional:
        share = float(stretched.get("partial_rotary_factor", 1.0))
        factor = float(stretched.get("factor", 1.0))
        scaling = RopeScaling(
            kind="proportional", factor=factor, original_max_position=fields["max_position"], share=share
        )
        fields["rope"] = dataclasses.replace(fields["rope"], scaling=scaling)
    parts: list[Any] = [
        _full_attention(hf, types),
        SharedKeysValues(layers=shared, wide_mlp=bool(hf.get("use_double_wide_mlp"))),
    ]
    if size := int(hf.get("hidden_size_per_layer_input") or 0):
        parts.append(LayerInputs(size=size, vocab_size=int(hf["vocab_size_per_layer_input"])))
    if hf.get("enable_moe_block"):
        sizes = hf["num_experts"], hf["top_k_experts"], hf["moe_intermediate_size"]
        parts.append(experts_everywhere(fields, *sizes))
    return {**completed(hf, fields, types, local_theta), "parts": tuple(parts)}


def completed(hf: Fields, fields: dict[str, Any], types: list[str], local_theta: float) -> dict[str, Any]:
    """`decoder`'s fields, with those that Gemma 3n and 4 share."""
    return {
        **fields,
        **attention_biases(hf),
        **windows_by_layer_types(hf, hf["sliding_window"], types),
        "activation": hf["hidden_activation"],
        "embedding_multiplier": float(hf["hidden_size"]) ** 0.5,
        "attention_scale": 1.0,
        "head": OutputHead(soft_cap=hf.get("final_logit_softcapping")),
        "rope": dataclasses.replace(fields["rope"], local_theta=local_theta),
    }


def _full_attention(hf: Fields, types: list[str]) -> FullAttention:
    """Older files have these sizes once, newer ones for each layer."""
    one_matrix, kv_heads = bool(hf.get("attention_k_eq_v")), int(hf["num_key_value_heads"])
    by_layer: dict[str, dict[str, int]] | None = hf.get("per_layer_config")
    if by_layer is None:
        changes = {
            "head_dim": hf["global_head_dim"],
            "num_key_value_heads": hf.get("num_global_key_value_heads") if one_matrix else None,
        }
    else:
        changes = by_layer.get(str(len(types) - 1).zfill(2)) or by_layer.get(str(len(types) - 1)) or {}
        expected = {i: changes for i, kind in enumerate(types) if kind == "full_attention"}
        if {int(layer): sizes for layer, sizes in by_layer.items()} != expected or changes.keys() - {
            "head_dim",
            "num_key_value_heads",
        }:
            raise ModelError(
                "per_layer_config may only change the number and size of heads, equally in all full_attention"
                " layers"
            )
    head_dim = int(changes.get("head_dim") or hf["head_dim"])
    return FullAttention(
        head_dim=head_dim,
        kv_heads=int(changes.get("num_key_value_heads") or kv_heads),
        keys_as_values=one_matrix,
    )


def unread(config: ModelConfig) -> frozenset[str]:
    """Tensors for keys and values in layers that read those of other layers."""
    shared = [i for i in range(config.num_layers) if kv_layer(config, i) != i]
    return frozenset(
        f"model.layers.{i}.self_attn.{part}.weight"
        for i in shared
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "sliding_window": 512,
    "tie_word_embeddings": True, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
}  # fmt: skip
PARTS = (FullAttention, SharedKeysValues, LayerInputs, MixtureOfExperts)
OTHER_PARTS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
TEXT = TextPart(("gemma4_text",), OTHER_PARTS, tied=True)


FAMILIES = {
    "gemma4": Family("Gemma 4 with images", Gemma4, read_gemma4, text_part=TEXT, unread=unread, parts=PARTS),
    "gemma4_text": Family("Gemma 4 (text)", Gemma4, read_gemma4, DEFAULTS, unread=unread, parts=PARTS),
}
