"""Families with layer norms and MLPs without a gate: GPT-2, OPT, GPT-J, GPT-NeoX and Pythia, Falcon, BLOOM,
Phi-1 to 2, StarCoder2, Nemotron and Minitron.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig, OutputHead, Rotary
from jengine.models.family import Family, Fields
from jengine.models.glm import GlmAttention
from jengine.models.hf_config import (
    attention_biases,
    decoder,
    partly_rotated,
    rope_fields,
    window_everywhere,
)
from jengine.models.layers import (
    Attend,
    Attention,
    Block,
    Layer,
    LayerNorm,
    Matrix,
    Mlp,
    Stream,
    dense,
    matrix,
    whole_matrix,
)
from jengine.models.llama import Llama
from jengine.models.pieces import Part, Piece, grouped, stacked
from jengine.models.residuals import ParallelLayer, ParallelResidual
from jengine.parallel.collectives import shard_index
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import array_of

BIASES = ("qkv_bias", "output_bias", "mlp_bias")


class GptNeoXAttention(Attention):
    output_name = "dense"

    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return grouped(f"{name}.query_key_value.{kind}", self.config, parts, *inputs)


class BloomAttention(GptNeoXAttention):
    slopes = True

    def options(self, layer: int) -> AttentionOptions:
        heads, every = self.qkv[...].shape[0], jnp.asarray(laid_slopes(self.config))
        slopes_here = lax.dynamic_slice_in_dim(every, shard_index() * heads, heads)
        return replace(super().options(layer), slopes=slopes_here)


class PhiAttention(Attention):
    output_name = "dense"


class GptJAttention(GlmAttention):
    output_name = "out_proj"


class Gpt2Attention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.c_attn.{kind}", parts, *inputs, transposed=True)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.c_proj.{kind}", shape[::-1], transposed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptLayers:
    """What differs between sizes of OPT.

    Attributes:
        pre_norm: norms come before attention and MLP, and one at the end; otherwise they come after each.
        embedding_size: size of token embeddings. If it is not hidden_size, they are projected to it and back.
    """

    pre_norm: bool
    embedding_size: int


class OptAttention(Attention):
    output_name = "out_proj"


class PostNormLayer(Layer):
    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = array_of(x)
        x = self.attention_norm(x + self.attention(layer, x, rotation, attend))
        return self.mlp_norm(x + self.mlp(x))


class Gpt2(Llama):
    """Positions are learned."""

    prefix = "transformer."
    entry: tuple[str, ...] = ("embed", "positions")
    gives_states = False
    embed_name, layers_name, norm_name, norm_names = "wte", "h", "ln_f", ("ln_1", "ln_2")
    attention: type[Attention] = Gpt2Attention
    attention_name, norm_type = "attn", LayerNorm
    positions_name, offset = "wpe", 0  # of the table of positions, and its rows before position 0

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        places = config.max_position + self.offset, config.hidden_size
        piece = Piece(f"{self.prefix}{self.positions_name}.weight", places)
        self.positions = matrix(places, dtype, ("positions", None), piece, exact=True)

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Mlp(config, dtype, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", transposed=True)

    def enter(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = super().enter(tokens, positions, attend)
        return x + self.positions[...].take(positions + self.offset if self.offset else positions)

    def rotations(self, positions: jax.Array) -> Callable[[int], Rotation | None]:
        return lambda layer: None


class Opt(Gpt2):
    """LayerNorm before attention and MLP. OPT-350m: after them; smaller embeddings with a projection."""

    prefix = "model."
    entry: tuple[str, ...] = ("embed", "positions", "project_in")
    head: tuple[str, ...] = ("lm_head", "project_out")
    embed_name, layers_name, norm_name = "decoder.embed_tokens", "decoder.layers", "decoder.final_layer_norm"
    norm_names = "self_attn_layer_norm", "final_layer_norm"
    attention, attention_name = OptAttention, "self_attn"
    positions_name, offset = "decoder.embed_positions", 2
    project_in: Matrix | None = None
    project_out: Matrix | None = None

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        hidden, size = config.hidden_size, self.embedding_size(config)

        def project(name: str, *shape: int) -> Matrix:
            return whole_matrix(f"model.decoder.{name}.weight", dtype, *shape, exact=True)

        if size != hidden:
            self.project_in = project("project_in", hidden, size)
            self.project_out = project("project_out", size, hidden)

    def embedding_size(self, config: ModelConfig) -> int:
        return config.part(OptLayers).embedding_size

    def final_norm(self, config: ModelConfig, dtype: jax.typing.DTypeLike) -> Block | None:
        return super().final_norm(config, dtype) if config.part(OptLayers).pre_norm else None

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        layer = super().layer(config, dtype, name, index)
        if config.part(OptLayers).pre_norm:
            return layer
        return PostNormLayer(layer.attention_norm, layer.attention, layer.mlp_norm, layer.mlp)

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return Mlp(config, dtype, f"{name}.fc1", f"{name}.fc2")

    def embedded(self, tokens: jax.Array) -> jax.Array:
        x = super().embedded(tokens)
        return x if self.project_in is None else dense(x, self.project_in[...])

    def logits(self, hidden: jax.Array) -> jax.Array:
        return super().logits(hidden if self.project_out is None else dense(hidden, self.project_out[...]))


class GptNeoX(Llama):
    prefix = "gpt_neox."
    embed_name, norm_name, head_name = "embed_in", "final_layer_norm", "embed_out"
    attention, norm_type, attention_name = GptNeoXAttention, LayerNorm, "attention"
    mlp_parts = "dense_h_to_4h", "dense_4h_to_h"


class Falcon(GptNeoX):
    """Attention and MLP have one norm (7B, 11B) or two (40B, 180B)."""

    prefix, head_name = "transformer.", "lm_head"
    embed_name, layers_name, norm_name = "word_embeddings", "h", "ln_f"
    attention_name = "self_attention"

    def norms_of_layer(self, config: ModelConfig) -> tuple[str, ...]:
        parallel = config.find(ParallelResidual)
        apart = parallel is not None and not parallel.shared_norm
        return ("ln_attn", "ln_mlp") if apart else super().norms_of_layer(config)


class Bloom(GptNeoX):
    """ALiBi (Press et al., 2022) instead of position embeddings."""

    prefix, head_name = "transformer.", "lm_head"
    entry: tuple[str, ...] = ("embed", "embedding_norm")
    embed_name, layers_name, norm_name = "word_embeddings", "h", "ln_f"
    attention, attention_name = BloomAttention, "self_attention"

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        name = f"{self.prefix}word_embeddings_layernorm"
        self.embedding_norm = LayerNorm(config.hidden_size, config, dtype, name)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        return self.embedding_norm(super().embedded(tokens))


class Phi(Llama):
    """Attention and MLP read one norm of the same input."""

    attention: type[Attention] = PhiAttention
    norm_type, layer_type = LayerNorm, ParallelLayer
    norm_name, norm_names = "final_layernorm", ("input_layernorm",)
    mlp_parts = "fc1", "fc2"


class GptJ(Phi):
    """Adjacent channels rotate together, only the first channels of each head."""

    prefix = "transformer."
    embed_name, layers_name, norm_name, norm_names = "wte", "h", "ln_f", ("ln_1",)
    attention, attention_name, mlp_parts = GptJAttention, "attn", ("fc_in", "fc_out")


class Starcoder2(Llama):
    norm_type, mlp_parts = LayerNorm, ("c_fc", "c_proj")


class Nemotron(Llama):
    norm_type, mlp_parts = LayerNorm, ("up_proj", "down_proj")


def laid_slopes(config: ModelConfig) -> np.ndarray:
    """Slopes of the heads of all devices, float32 [num_kv_heads_padded]; 0 for padding."""
    known = np.repeat(np.array(slopes(config.num_heads), np.float32), config.kv_repeats)
    return np.pad(known, (0, config.num_kv_heads_padded - len(known)))


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes.

    For a power of two, they are a geometric sequence. Other numbers of heads continue with every second
    element of the sequence for the next power of two.
    """
    whole = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return first + [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]


def read_gpt2(hf: Fields) -> dict[str, Any]:
    scale = None if hf.get("scale_attn_weights", True) else 1.0
    return {**gpt_fields(hf), "attention_scale": scale, **dict.fromkeys(BIASES, True)}


def read_gptj(hf: Fields) -> dict[str, Any]:
    fields, rotary = gpt_fields(hf), hf["rotary_dim"]
    rope = Rotary(dim=int(rotary or fields["head_dim"]))
    return {**fields, "rope": rope, "mlp_bias": True, "head": OutputHead(bias=True)}


def gpt_fields(hf: Fields) -> dict[str, Any]:
    """The fields that GPT-2 and GPT-J share."""
    hf.rename(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    hf.rename(max_position_embeddings="n_positions", rms_norm_eps="layer_norm_epsilon")
    hf["intermediate_size"] = hf.get("n_inner") or 4 * int(hf["n_embd"])
    return {**decoder(hf, {}), "activation": hf["activation_function"]}


def read_opt(hf: Fields) -> dict[str, Any]:
    hf.rename(intermediate_size="ffn_dim")
    layers = OptLayers(
        pre_norm=bool(hf.get("do_layer_norm_before", True)),
        embedding_size=int(hf.get("word_embed_proj_dim") or hf["hidden_size"]),
    )
    return {
        **decoder(hf, {}),
        "norm_eps": 1e-5,
        "activation": hf.get("activation_function", "relu"),
        "parts": (layers,),
        **dict.fromkeys(BIASES, bool(hf.get("enable_bias", True))),
    }


def read_gpt_neox(hf: Fields) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", True))
    rotary = {"rope_theta": hf.get("rotary_emb_base"), **rope_fields(hf)}
    return {
        **partly_rotated(hf, float(hf.get("rotary_pct", 0.25)), rotary),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "parts": (ParallelResidual(shared_norm=False),) if hf.get("use_parallel_residual", True) else (),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
    }


def read_falcon(hf: Fields) -> dict[str, Any]:
    if hf.get("alibi"):
        raise ModelError("alibi is not supported; rotary embedding is")
    new, parallel = bool(hf.get("new_decoder_architecture", False)), bool(hf.get("parallel_attn", True))
    norms = int(hf.get("num_ln_in_parallel_attn") or 2) if new else 1
    if new and not parallel:
        raise ModelError("parallel_attn=False is not supported with new_decoder_architecture")
    hf["intermediate_size"] = hf.get("ffn_hidden_size") or 4 * int(hf["hidden_size"])
    fields, multi_query = decoder(hf), bool(hf.get("multi_query", True))
    kv_heads = int(hf.get("num_kv_heads") or fields["num_heads"])
    return {
        **fields,
        "num_kv_heads": kv_heads if new else 1 if multi_query else fields["num_heads"],
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "parts": (ParallelResidual(shared_norm=norms == 1),) if parallel else (),
        "activation": hf.get("activation", "gelu"),
        **dict.fromkeys(BIASES, bool(hf.get("bias", False))),
    }


def read_bloom(hf: Fields) -> dict[str, Any]:
    older = {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    hf.rename(**{ours: theirs for ours, theirs in older.items() if hf.get(theirs)})
    hf["intermediate_size"] = 4 * int(hf["hidden_size"])
    fields = decoder(hf, {})
    return {
        **fields,
        "rope": Rotary(unrotated=tuple(range(fields["num_layers"]))),
        "max_position": int(hf.get("seq_length", 2048)),
        "norm_eps": float(hf.get("layer_norm_epsilon", 1e-5)),
        "activation": "gelu_new",
        **dict.fromkeys(BIASES, True),
    }


def read_phi(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.5),
        "norm_eps": float(hf.get("layer_norm_eps", 1e-5)),
        "head": OutputHead(bias=True),
        **dict.fromkeys(BIASES, True),
    }


def read_starcoder2(hf: Fields) -> dict[str, Any]:
    return {
        **decoder(hf),
        **window_everywhere(hf, hf.get("sliding_window")),
        "norm_eps": float(hf.get("norm_epsilon", 1e-5)),
        **dict.fromkeys(BIASES, bool(hf.get("use_bias", True))),
    }


def read_nemotron(hf: Fields) -> dict[str, Any]:
    return {
        **partly_rotated(hf, 0.5),
        **attention_biases(hf),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "norm_eps": float(hf.get("norm_eps", 1e-5)),
        "norm_offset": 1.0,
    }


PARALLEL = (ParallelResidual,)
GPT = {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
STARCODER2 = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "tie_word_embeddings": True}
NEMOTRON = {"hidden_act": "relu2", "max_position_embeddings": 4096}
FAMILIES = {
    "bloom": Family("BLOOM, BLOOMZ", Bloom, read_bloom, {"tie_word_embeddings": True}),
    "falcon": Family("Falcon", Falcon, read_falcon, {"tie_word_embeddings": True}, parts=PARALLEL),
    "gpt2": Family("GPT-2", Gpt2, read_gpt2, {**GPT, "tie_word_embeddings": True}),
    "gpt_neox": Family("GPT-NeoX, Pythia", GptNeoX, read_gpt_neox, {"hidden_act": "gelu"}, parts=PARALLEL),
    "gptj": Family("GPT-J", GptJ, read_gptj, {**GPT, "n_positions": 2048, "rotary_dim": 64}),
    "nemotron": Family("Nemotron (2024), Minitron", Nemotron, read_nemotron, NEMOTRON),
    "opt": Family("OPT", Opt, read_opt, {"tie_word_embeddings": True}, parts=(OptLayers,)),
    "phi": Family("Phi-1, Phi-1.5, Phi-2", Phi, read_phi, {"hidden_act": "gelu_new"}),
    "starcoder2": Family("StarCoder2", Starcoder2, read_starcoder2, STARCODER2),
}
