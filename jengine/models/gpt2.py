"""GPT-2: learned positions, LayerNorm, projections stored [in, out]."""

from __future__ import annotations

from collections.abc import Sequence
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
    Mlp,
    dense,
    embed,
    exact_matrix,
    lookup,
    vocabulary,
    with_images,
)
from jengine.models.pieces import Part, Piece, stacked


class Gpt2Attention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.c_attn.{kind}", parts, *inputs, transposed=True)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.c_proj.{kind}", shape[::-1], transposed=True)


class Gpt2(nnx.Module):
    prefix = "transformer."
    indivisible = ""
    takes_embeddings = True
    entry: tuple[str, ...] = ("embed", "positions")
    head: tuple[str, ...] = ("lm_head",)

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        hidden = config.hidden_size
        places = (config.max_position, hidden)
        self.embed = vocabulary(config, hidden, dtype, "transformer.wte.weight")
        self.positions = exact_matrix(
            places, dtype, ("positions", None), Piece("transformer.wpe.weight", places)
        )

        def layer(name: str) -> Layer:
            return Layer(
                LayerNorm(hidden, config, dtype, f"{name}.ln_1"),
                Gpt2Attention(config, dtype, f"{name}.attn"),
                LayerNorm(hidden, config, dtype, f"{name}.ln_2"),
                Mlp(config, dtype, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", transposed=True),
            )

        self.layers = nnx.List([layer(f"transformer.h.{i}") for i in range(config.num_layers)])
        self.norm = LayerNorm(hidden, config, dtype, "transformer.ln_f")
        self.lm_head = None if config.tie_embeddings else vocabulary(config, hidden, dtype, "lm_head.weight")

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        return whole_pass(self, tokens, positions, attend)

    def enter(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        x = with_images(embed(self.embed[...], tokens), attend)
        return x + lookup(self.positions[...], positions)

    def through(self, x: Any, positions: jax.Array, attend: Attend, layers: range) -> jax.Array:
        return in_order(self, x, attend, layers)

    def leave(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return dense(hidden, (self.embed if self.lm_head is None else self.lm_head)[...], dtype=jnp.float32)


def read_gpt2(hf: Fields) -> dict[str, Any]:
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


FAMILIES = {"gpt2": Family("GPT-2", Gpt2, read_gpt2, {"tie_word_embeddings": True})}
