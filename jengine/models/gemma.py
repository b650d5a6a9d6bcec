"""Gemma: scaled embeddings. Gemma 2 and 3: norms before and after attention and MLP, soft caps, sliding
windows in most layers. Gemma 3n: several residual streams of which a layer computes one (AltUp), low-rank
shortcuts (LAuReL), sparse MLPs; else as Gemma 4.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig, OutputHead
from jengine.models.facts import Working
from jengine.models.family import OF_WHOLE, Family, Fields, TextPart
from jengine.models.gemma4 import (
    OTHER_PARTS,
    Gemma4,
    Gemma4Attention,
    LayerInput,
    LayerInputs,
    SharedKeysValues,
    completed,
    unread,
)
from jengine.models.hf_config import (
    attention_biases,
    check_shared_layers,
    decoder,
    full_attention_every,
    rope_by_layer_types,
    windows_but_every,
)
from jengine.models.layers import Attend, GatedMlp, Matrix, RMSNorm, dense, matrix, param, whole_matrix
from jengine.models.llama import Llama
from jengine.models.pieces import Piece
from jengine.models.qwen import Qwen3Attention
from jengine.models.residuals import SandwichLayer
from jengine.parallel.collectives import all_reduce
from pallas_kernels.elementwise.activations import gated
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import Rows
from pallas_kernels.products.weight import Weight

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma2(Llama):
    layer_type = SandwichLayer
    norm_names = NORMS


class Gemma3(Gemma2):
    attention = Qwen3Attention


HEADS = {"head_dim": 256, "tie_word_embeddings": True}
DEFAULTS = {
    **HEADS, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
GEMMA2_DEFAULTS = {
    **DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA3_DEFAULTS = {**DEFAULTS, "max_position_embeddings": 131072}
IMAGES_DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


def _shared(hf: Fields, rope_parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        **decoder(hf, rope_parameters),
        **attention_biases(hf),
        "embedding_multiplier": float(hf["hidden_size"]) ** 0.5,
        "norm_offset": 1.0,
    }


def _capped(hf: Fields) -> dict[str, Any]:
    return {
        "activation": hf["hidden_activation"],
        "attention_scale": float(hf["query_pre_attn_scalar"]) ** -0.5,
        "head": OutputHead(soft_cap=hf.get("final_logit_softcapping")),
    }


def read_gemma(hf: Fields) -> dict[str, Any]:
    activation = hf.get("hidden_activation") or hf.get("hidden_act", "gelu")
    # The first checkpoints specify gelu but were trained with its approximation.
    return {**_shared(hf), "activation": "gelu_pytorch_tanh" if activation == "gelu" else activation}


def read_gemma2(hf: Fields) -> dict[str, Any]:
    windows = windows_but_every(hf, hf["sliding_window"], 2)
    return {**_shared(hf), **_capped(hf), **windows, "attention_soft_cap": hf.get("attn_logit_softcapping")}


def read_gemma3(hf: Fields) -> dict[str, Any]:
    windows = windows_but_every(hf, hf["sliding_window"], int(hf.get("sliding_window_pattern") or 6))
    everywhere, local_theta = rope_by_layer_types(
        hf, theta=1e6, local_theta=hf.get("rope_local_base_freq") or 10000.0
    )
    fields = _shared(hf, everywhere)
    return {**fields, **_capped(hf), **windows, "rope": replace(fields["rope"], local_theta=local_theta)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Several residual streams, of which layers compute one. Fields as in Hugging Face configs.

    Attributes:
        active: index of the stream that layers compute.
        scaled: whether this stream is scaled per channel before the gate of the layer's own embedding.
        laurel_rank: rank of the shortcut beside attention.
        sparsity: share of the MLP's gates that each layer drops.
    """

    streams: int
    active: int
    scaled: bool
    laurel_rank: int
    sparsity: tuple[float, ...]


class SparseMlp(GatedMlp):
    """Keeps only gates above a cutoff: the token's mean plus as many standard deviations as drop the given
    share.
    """

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, sparsity: float) -> None:
        super().__init__(config, dtype, name)
        self.size, self.deviations = config.intermediate_size, statistics.NormalDist().inv_cdf(sparsity)

    def own_part(self, x: Rows) -> jax.Array:
        y = dense(x, self.gate_up[...])
        gate, up = jnp.moveaxis(y.astype(jnp.float32), -1, 0)
        # [N, 2]; padding is zero
        sums = all_reduce(jnp.stack([gate.sum(-1), (gate * gate).sum(-1)], -1)) / self.size
        mean, square = sums[:, :1], sums[:, 1:]
        cutoff = mean + self.deviations * jnp.sqrt(jnp.maximum(square - mean * mean, 0))
        sparse = jnp.stack([jax.nn.relu(gate - cutoff), up], -1).astype(y.dtype)
        return dense(gated(sparse, self.activation), self.down[...])


class Streams(nnx.Module):
    """AltUp (Baykal et al. 2023): streams are mixed before a layer; the layer updates one, and a share of its
    change is added to all.
    """

    def __init__(self, config: ModelConfig, parts: AltUp, dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden, count = config.hidden_size, parts.streams
        self.active, self.scaled = parts.active, parts.scaled
        self.norm = RMSNorm(hidden, config, dtype, f"{name}.router_norm")

        def small(tensor: str, *shape: int) -> Matrix:
            return whole_matrix(f"{name}.{tensor}.weight", dtype, *shape, exact=True)

        self.router = small("modality_router", count, hidden)
        self.mix = small("prediction_coefs", count**2, count)
        self.share = small("correction_coefs", count, count)
        self.scale = param((hidden,), dtype, (None,), Piece(f"{name}.correct_output_scale", (hidden,)))

    def kinds(self, x: jax.Array) -> jax.Array:
        """[N, hidden] -> [N, streams]"""
        routed = dense(self.norm(x) * jnp.asarray(1 / x.shape[-1], x.dtype), self.router[...])
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def predicted(self, streams: jax.Array) -> jax.Array:
        """[streams, N, hidden] -> the same, mixed."""
        count, tokens, _ = streams.shape
        mix = dense(self.kinds(streams[self.active]), self.mix[...]).reshape(tokens, count, count)
        mixed = jnp.einsum(
            "nij,jnd->ind", mix, streams, precision="highest", preferred_element_type=jnp.float32
        )
        return streams + mixed.astype(streams.dtype)

    def corrected(self, streams: jax.Array, computed: jax.Array) -> jax.Array:
        """Mixed streams, and the layer's result for the active one -> the streams after the layer."""
        share = dense(self.kinds(computed), self.share[...]) + 1
        return streams + (computed - streams[self.active]) * share.T[:, :, None]

    def own(self, streams: jax.Array) -> jax.Array:
        """The active stream, scaled for the gate of the layer's own embedding."""
        return streams[self.active] * self.scale[...] if self.scaled else streams[self.active]


class Laurel(nnx.Module):
    """A low-rank shortcut beside attention."""

    def __init__(self, config: ModelConfig, rank: int, dtype: jax.typing.DTypeLike, name: str) -> None:
        hidden = config.hidden_size
        self.left = whole_matrix(f"{name}.linear_left.weight", dtype, rank, hidden)
        self.right = whole_matrix(f"{name}.linear_right.weight", dtype, hidden, rank)
        self.norm = RMSNorm(hidden, config, dtype, f"{name}.post_laurel_norm")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.norm(dense(dense(x, self.left[...]), self.right[...]))


class Gemma3nLayer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> None:
        def norm(place: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype, f"{name}.{place}_layernorm")

        parts, inputs = config.part(AltUp), config.part(LayerInputs)
        self.attention_norm, self.attention_result_norm = norm("input"), norm("post_attention")
        self.attention = Gemma4Attention(config, dtype, f"{name}.self_attn", index)
        self.mlp_norm, self.mlp_result_norm = norm("pre_feedforward"), norm("post_feedforward")
        sparsity = parts.sparsity[index]
        self.mlp = (
            SparseMlp(config, dtype, f"{name}.mlp", sparsity)
            if sparsity
            else GatedMlp(config, dtype, f"{name}.mlp")
        )
        self.streams = Streams(config, parts, dtype, f"{name}.altup")
        self.laurel = Laurel(config, parts.laurel_rank, dtype, f"{name}.laurel")
        self.input = LayerInput(config, inputs.size, dtype, name)

    def __call__(
        self, layer: int, streams: jax.Array, rotation: Rotation, attend: Attend, inputs: jax.Array
    ) -> jax.Array:
        """streams [streams, N, hidden] -> the same."""
        streams = self.streams.predicted(streams)
        x = streams[self.streams.active]
        normed = self.attention_norm(x)
        x = x + self.attention_result_norm(self.attention(layer, normed, rotation, attend))
        x = (x + self.laurel(normed)) * jnp.asarray(0.5**0.5, x.dtype)
        x = x + self.mlp_result_norm(self.mlp(self.mlp_norm(x)))
        streams = self.streams.corrected(streams, x)
        return streams.at[1:].add(self.input(self.streams.own(streams), inputs))


class Gemma3n(Gemma4):
    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        altup, square = config.part(AltUp), (config.hidden_size, config.hidden_size)

        self.inactive = count = altup.streams - 1

        def others(name: str) -> Matrix:
            pieces = (Piece(f"{self.prefix}{name}.{i}.weight", square, (i,)) for i in range(count))
            return matrix((count, *square), dtype, (None, None, None), *pieces, exact=True)

        self.into, self.out_of = others("altup_projections"), others("altup_unembed_projections")

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Any:
        return Gemma3nLayer(config, dtype, name, index)

    def each(self, stacked: Matrix) -> list[Weight]:
        """The matrices of the inactive streams."""
        return [stacked[i] for i in range(self.inactive)]

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = self.embedded(tokens)
        inputs = self.layer_inputs(tokens, x)
        assert inputs is not None
        streams = jnp.stack([x, *(_as_large(dense(x, weight), x) for weight in self.each(self.into))])
        streams = self.through(streams, positions, attend, range(len(self.layers)), inputs=inputs)
        first, others = streams[0], zip(streams[1:], self.each(self.out_of), strict=True)
        together = sum((_as_large(dense(x, weight), first) for x, weight in others), start=first)
        return self.leave(together * jnp.asarray(1 / len(streams), first.dtype))

    def working(self, tokens: int) -> Working:
        others = self.config.part(AltUp).streams - 1
        return Working(channels=super().working(tokens).channels + 8 * others * self.config.hidden_size)


def _as_large(x: jax.Array, like: jax.Array) -> jax.Array:
    """x, scaled row by row to the root mean square of another array."""
    squares = [jnp.mean(jnp.square(y.astype(jnp.float32)), -1, keepdims=True) for y in (x, like)]
    return (x * (jnp.sqrt(squares[1]) / jnp.sqrt(jnp.maximum(squares[0], 1e-5)))).astype(x.dtype)


def read_gemma3n(hf: Fields) -> dict[str, Any]:
    """Raises ModelError if layers have different sizes, or a share is out of range."""
    layers, sizes = int(hf["num_hidden_layers"]), hf["intermediate_size"]
    if isinstance(sizes, list):
        if len(sizes) != layers or len(set(sizes)) != 1:
            raise ModelError(
                f"intermediate_size={sizes} is not supported; all {layers} layers must have the same size"
            )
        hf["intermediate_size"] = sizes[0]
    types = hf.get("layer_types") or full_attention_every(layers, 5)
    shared = check_shared_layers(hf, types)
    sparsity = hf.get("activation_sparsity_pattern")
    sparsity = (
        [0.95 if layers > 10 and i < 10 else 0.0 for i in range(layers)] if sparsity is None else sparsity
    )
    sparsity = sparsity if isinstance(sparsity, list) else [sparsity] * layers
    if len(sparsity) != layers or not all(0 <= share < 1 for share in sparsity):
        raise ModelError(
            f"activation_sparsity_pattern={sparsity} must give {layers} layers shares from 0 to below 1"
        )
    everywhere, local_theta = rope_by_layer_types(
        hf, theta=1e6, local_theta=hf.get("rope_local_base_freq") or 1e4
    )
    inputs = LayerInputs(
        size=int(hf["hidden_size_per_layer_input"]), vocab_size=int(hf["vocab_size_per_layer_input"])
    )
    altup = AltUp(
        streams=int(hf["altup_num_inputs"]),
        active=int(hf["altup_active_idx"]),
        scaled=bool(hf["altup_correct_scale"]),
        laurel_rank=int(hf["laurel_rank"]),
        sparsity=tuple(float(share) for share in sparsity),
    )
    fields = completed(hf, decoder(hf, everywhere), types, local_theta)
    return {**fields, "parts": (SharedKeysValues(layers=shared), inputs, altup)}


GEMMA3N_DEFAULTS = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "sliding_window": 512,
    "tie_word_embeddings": True, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 15,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "laurel_rank": 64,
    "altup_num_inputs": 4, "altup_active_idx": 0, "altup_correct_scale": True,
}  # fmt: skip
GEMMA3N_PARTS = (SharedKeysValues, LayerInputs, AltUp)
GEMMA3N_TEXT = TextPart(("gemma3n_text",), OTHER_PARTS, tied=True)


FAMILIES = {
    "gemma": Family("Gemma", Llama, read_gemma, {**HEADS, "max_position_embeddings": 8192}),
    "gemma2": Family("Gemma 2", Gemma2, read_gemma2, GEMMA2_DEFAULTS),
    "gemma3": Family(
        "Gemma 3 with images", Gemma3, read_gemma3, IMAGES_DEFAULTS, TextPart(("gemma3_text",), tied=True)
    ),
    "gemma3_text": Family("Gemma 3 (text)", Gemma3, read_gemma3, GEMMA3_DEFAULTS),
    "gemma3n": Family(
        "Gemma 3n with images and sound (its text model)",
        Gemma3n,
        read_gemma3n,
        text_part=GEMMA3N_TEXT,
        unread=unread,
        parts=GEMMA3N_PARTS,
    ),
    "gemma3n_text": Family(
        "Gemma 3n (text)",
        Gemma3n,
        read_gemma3n,
        GEMMA3N_DEFAULTS,
        unread=unread,
        parts=GEMMA3N_PARTS,
        renamed=OF_WHOLE,
    ),
}
