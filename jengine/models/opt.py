"""OPT: learned positions; LayerNorm before attention and MLP. OPT-350m: LayerNorm after them; smaller
embeddings with a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.layered import in_order, whole_pass
from jengine.models.layers import (
    Attend,
    Attention,
    Layer,
    LayerNorm,
    Matrix,
    Mlp,
    dense,
    embed,
    exact_matrix,
    lookup,
    vocabulary,
    with_images,
)
from jengine.models.pieces import Piece
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import Sum, array_of

OFFSET = 2  # rows of the position table before position 0


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
    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.out_proj.{kind}", shape)


class PostNormLayer(Layer):
    def __call__(
        self, layer: int, x: jax.Array | Sum, rotation: Rotation | None, attend: Attend
    ) -> jax.Array:
        x = array_of(x)
        x = self.attention_norm(x + self.attention(layer, x, rotation, attend))
        return self.mlp_norm(x + self.mlp(x))


class Opt(nnx.Module):
    prefix = "model."
    indivisible = ""
    takes_embeddings = True
    entry: tuple[str, ...] = ("embed", "positions", "project_in")
    head: tuple[str, ...] = ("lm_head", "project_out")

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        options = config.part(OptLayers)
        hidden, size = config.hidden_size, options.embedding_size
        places = (config.max_position + OFFSET, hidden)

        def project(name: str, *shape: int) -> Matrix | None:
            return (
                None
                if size == hidden
                else exact_matrix(shape, dtype, (None, None), Piece(f"model.decoder.{name}.weight", shape))
            )

        def layer(name: str) -> Layer:
            return (Layer if options.pre_norm else PostNormLayer)(
                LayerNorm(hidden, config, dtype, f"{name}.self_attn_layer_norm"),
                OptAttention(config, dtype, f"{name}.self_attn"),
                LayerNorm(hidden, config, dtype, f"{name}.final_layer_norm"),
                Mlp(config, dtype, f"{name}.fc1", f"{name}.fc2"),
            )

        self.embed = vocabulary(config, size, dtype, "model.decoder.embed_tokens.weight")
        self.positions = exact_matrix(
            places, dtype, ("positions", None), Piece("model.decoder.embed_positions.weight", places)
        )
        self.project_in, self.project_out = (
            project("project_in", hidden, size),
            project("project_out", size, hidden),
        )
        self.layers = nnx.List([layer(f"model.decoder.layers.{i}") for i in range(config.num_layers)])
        self.norm = (
            LayerNorm(hidden, config, dtype, "model.decoder.final_layer_norm") if options.pre_norm else None
        )
        self.lm_head = None if config.tie_embeddings else vocabulary(config, size, dtype, "lm_head.weight")

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        return whole_pass(self, tokens, positions, attend)

    def enter(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = embed(self.embed[...], tokens)
        if self.project_in is not None:
            x = dense(x, self.project_in[...])
        return with_images(x, attend) + lookup(self.positions[...], positions + OFFSET)

    def through(self, x: Any, positions: jax.Array, attend: Attend, layers: range) -> jax.Array:
        return in_order(self, x, attend, layers)

    def leave(self, x: jax.Array) -> jax.Array:
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        if self.project_out is not None:
            hidden = dense(hidden, self.project_out[...])
        return dense(hidden, (self.embed if self.lm_head is None else self.lm_head)[...], dtype=jnp.float32)


def read_opt(hf: Fields) -> dict[str, Any]:
    heads, hidden = int(hf["num_attention_heads"]), int(hf["hidden_size"])
    layers = OptLayers(
        pre_norm=bool(hf.get("do_layer_norm_before", True)),
        embedding_size=int(hf.get("word_embed_proj_dim") or hidden),
    )
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
        "activation": hf.get("activation_function", "relu"),
        "parts": (layers,),
        "tie_embeddings": bool(hf["tie_word_embeddings"]),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(hf.get("enable_bias", True))),
    }


FAMILIES = {"opt": Family("OPT", Opt, read_opt, {"tie_word_embeddings": True}, parts=(OptLayers,))}
