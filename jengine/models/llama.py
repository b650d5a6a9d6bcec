"""Llama 2, 3 and 3.1+, the base of most families. Qwen2 is a Llama with another configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder, windows_by_layer_types
from jengine.models.layered import in_order, whole_pass
from jengine.models.layers import (
    Attend,
    Attention,
    Block,
    GatedMlp,
    Layer,
    LayerNorm,
    RMSNorm,
    dense,
    embed,
    param,
    value,
    vocabulary,
    with_images,
)
from jengine.models.pieces import Piece
from jengine.models.rope import local_rope, rope
from pallas_kernels.elementwise.rotary import Rotation


class Llama(nnx.Module):
    """A decoder-only transformer as a function of arrays, on a flat token axis.

    A family that differs only in attention or norms sets `attention` or `norm_type`. Others override `mlp` or
    `layer`.
    """

    prefix = "model."
    head: tuple[str, ...] = ("lm_head",)
    entry: tuple[str, ...] = ("embed",)  # see Layered
    indivisible = ""
    gives_states = takes_embeddings = True  # see Model
    # names in the checkpoint
    embed_name, layers_name, norm_name, head_name = "embed_tokens", "layers", "norm", "lm_head"
    attention: type[Attention] = Attention
    norm_type: type[RMSNorm | LayerNorm] = RMSNorm

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        self.config = config
        self.rope, self.local_rope = rope(config, max_model_len), local_rope(config, max_model_len)
        self.embed = vocabulary(config, config.hidden_size, dtype, f"{self.prefix}{self.embed_name}.weight")
        names = (self.layer_name(config, i) for i in range(config.num_layers))
        self.layers = nnx.List([self.layer(config, dtype, name, i) for i, name in enumerate(names)])
        self.norm = self.norm_type(config.hidden_size, config, dtype, f"{self.prefix}{self.norm_name}")
        self.lm_head = (
            None
            if config.tie_embeddings
            else vocabulary(config, config.hidden_size, dtype, f"{self.head_name}.weight")
        )
        size = config.vocab_size
        bias = Piece(f"{self.head_name}.bias", (size,), (slice(0, size),))
        self.head_bias = param((config.padded(size),), dtype, ("vocab",), bias) if config.head.bias else None

    def layer_name(self, config: ModelConfig, index: int) -> str:
        """The prefix of a layer's tensors in the checkpoint."""
        return f"{self.prefix}{self.layers_name}.{index}"

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        return Layer(
            self.norm_type(config.hidden_size, config, dtype, f"{name}.input_layernorm"),
            self.attention(config, dtype, f"{name}.self_attn"),
            self.norm_type(config.hidden_size, config, dtype, f"{name}.post_attention_layernorm"),
            self.mlp(config, dtype, name, index),
        )

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        return GatedMlp(config, dtype, f"{name}.mlp")

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """int32[N] -> [N, hidden]."""
        x = embed(self.embed[...], tokens)
        return (
            x
            if self.config.embedding_multiplier == 1
            else x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        )

    def attending(self, positions: jax.Array, attend: Attend) -> Attend:
        """A family's change to what its layers attend with."""
        return attend

    def hidden_and_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        before: Sequence[int] = (),
    ) -> tuple[jax.Array, list[jax.Array]]:
        """What `hidden` returns, and the residual stream [N, hidden] before each of these layers; the number
        of layers stands for the end.
        """
        states: dict[int, Any] = dict.fromkeys(before)
        x = self.enter(tokens, positions, attend)
        x = self.through(x, positions, attend, range(len(self.layers)), states=states)
        states[len(self.layers)] = x
        return self.leave(x), [states[i] for i in before]

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        return whole_pass(self, tokens, positions, attend)

    def enter(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        return with_images(self.embedded(tokens), attend)

    def through(
        self,
        x: Any,
        positions: jax.Array,
        attend: Attend,
        layers: range,
        *,
        states: dict[int, Any] | None = None,
        inputs: jax.Array | None = None,
    ) -> jax.Array:
        """Calls these layers; see `Layered` and `in_order`."""
        attend, rotation = self.attending(positions, attend), self._rotations(positions)
        return in_order(self, x, attend, layers, rotation, states=states, inputs=inputs)

    def _rotations(self, positions: jax.Array) -> Callable[[int], Rotation | None]:
        """The rotation of each layer; None: it has none."""
        everywhere = nearby = self.rope.cos_sin(positions)
        if self.local_rope != self.rope:
            nearby = self.local_rope.cos_sin(positions)
        config = self.config

        def rotation(layer: int) -> Rotation | None:
            if layer in config.rope.unrotated:
                return None
            return everywhere if config.window(layer) is None else nearby

        return rotation

    def leave(self, x: jax.Array) -> jax.Array:
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, hidden] -> float32[N, vocab]."""
        logits = dense(
            hidden,
            (self.embed if self.lm_head is None else self.lm_head)[...],
            value(self.head_bias),
            jnp.float32,
        )
        if self.config.head.divisor != 1:
            logits /= self.config.head.divisor
        cap = self.config.head.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def read_llama(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **attention_biases(hf), "mlp_bias": bool(hf.get("mlp_bias", False))}


def qwen_windows(hf: Fields) -> dict[str, Any]:
    layers, first = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    window = hf.get("sliding_window", 4096)  # present in many configurations that do not use it
    types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return windows_by_layer_types(hf, window if hf.get("use_sliding_window") else None, types)


def read_qwen2(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **qwen_windows(hf), "qkv_bias": True}


FAMILIES = {
    "llama": Family("Llama 2, 3, 3.1 and later", Llama, read_llama),
    "qwen2": Family("Qwen2, Qwen2.5", Llama, read_qwen2),
}
