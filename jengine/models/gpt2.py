"""GPT-2: learned positions, LayerNorm, projections stored [in, out]."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.config import ModelConfig
from jengine.models.layers import Attend, Attention, Layer, LayerNorm, Mlp, dense, embed, lookup, param, vocabulary
from jengine.models.pieces import Part, Piece, stacked


class Gpt2Attention(Attention):
    def qkv_source(self, name: str, kind: str, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
        return stacked(f"{name}.c_attn.{kind}", parts, *inputs, transposed=True)

    def output_source(self, name: str, kind: str, *shape: int) -> Piece:
        return Piece(f"{name}.c_proj.{kind}", shape[::-1], transposed=True)


class Gpt2(nnx.Module):
    prefix = "transformer."

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        hidden = config.hidden_size
        places = (config.max_position, hidden)
        self.embed = vocabulary(config, hidden, dtype, "transformer.wte.weight")
        self.positions = param(places, dtype, (None, None), Piece("transformer.wpe.weight", places))

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
        x = embed(self.embed[...], tokens) + lookup(self.positions[...], positions)
        for i, layer in enumerate(self.layers):
            x = layer(i, x, None, attend)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return dense(hidden, (self.embed if self.lm_head is None else self.lm_head)[...], dtype=jnp.float32)
