"""Llama, the base of most families, and SmolLM3 and SmolVLM, which differ in their configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import attention_biases, decoder, windows_by_layer_types
from jengine.models.layers import (
    GATED,
    Attend,
    Attention,
    Block,
    GatedMlp,
    Layer,
    LayerNorm,
    Mixer,
    Mlp,
    RMSNorm,
    Stream,
    dense,
    embed,
    param,
    value,
    vocabulary,
    with_images,
)
from jengine.models.moe import Experts, has_experts
from jengine.models.pieces import Piece
from jengine.models.residuals import ParallelLayer, ParallelResidual
from jengine.models.rope import local_rope, rope
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import Sum, array_of


class Llama(nnx.Module):
    """A decoder-only transformer as a function of arrays, on a flat token axis.

    Families set the attributes below. What these do not say is in an override of `mixer`, `mlp` or `layer`.

    Attributes:
        norm_names: of a layer: its one norm; those of the inputs of attention and MLP; or, for each of both,
            those of its input and its result.
        mlp_parts: the products gate, up and down of an MLP, or of each expert; or up and down alone.
    """

    prefix = "model."
    head: tuple[str, ...] = ("lm_head",)
    entry: tuple[str, ...] = ("embed",)  # attributes that only `enter` uses, or `enter` and `logits`
    indivisible = ""  # why stages of a pipeline cannot divide the layers; "": they can
    gives_states = takes_embeddings = True  # see Model
    # names in the checkpoint
    embed_name, layers_name, norm_name, head_name = "embed_tokens", "layers", "norm", "lm_head"
    attention_name, mlp_name = "self_attn", "mlp"
    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    mlp_parts: tuple[str, ...] = GATED
    # types of parts
    attention: Callable[..., Mixer] = Attention
    norm_type: type[RMSNorm | LayerNorm] = RMSNorm
    layer_type: Callable[..., Layer] = Layer
    gated_mlp: type[GatedMlp] = GatedMlp
    experts: type[Experts] = Experts

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        self.config = config
        self.rope, self.local_rope = rope(config, max_model_len), local_rope(config, max_model_len)
        size = self.embedding_size(config)
        self.embed = vocabulary(config, size, dtype, f"{self.prefix}{self.embed_name}.weight")
        names = (self.layer_name(config, i) for i in range(config.num_layers))
        self.layers = nnx.List([self.layer(config, dtype, name, i) for i, name in enumerate(names)])
        self.norm = self.final_norm(config, dtype)
        self.lm_head = (
            None if config.tie_embeddings else vocabulary(config, size, dtype, f"{self.head_name}.weight")
        )
        tokens = config.vocab_size
        bias = Piece(f"{self.head_name}.bias", (tokens,), (slice(0, tokens),))
        self.head_bias = (
            param((config.padded(tokens),), dtype, ("vocab",), bias) if config.head.bias else None
        )

    def embedding_size(self, config: ModelConfig) -> int:
        return config.hidden_size

    def final_norm(self, config: ModelConfig, dtype: jax.typing.DTypeLike) -> Block | None:
        return self.norm_type(config.hidden_size, config, dtype, f"{self.prefix}{self.norm_name}")

    def layer_name(self, config: ModelConfig, index: int) -> str:
        """The prefix of a layer's tensors in the checkpoint."""
        return f"{self.prefix}{self.layers_name}.{index}"

    def layer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Layer:
        places = self.norms_of_layer(config)
        norms = [self.norm_type(config.hidden_size, config, dtype, f"{name}.{place}") for place in places]
        half = (len(norms) + 1) // 2
        (first, *result), (second, *mlp_result) = norms[:half], norms[-half:]
        mixer, mlp = self.mixer(config, dtype, name, index), self.mlp(config, dtype, name, index)
        kind: Callable[..., Layer] = ParallelLayer if config.find(ParallelResidual) else self.layer_type
        return kind(first, mixer, *result, second, mlp, *mlp_result)

    def norms_of_layer(self, config: ModelConfig) -> tuple[str, ...]:
        """Names of a layer's norms, as those of `norm_names`."""
        parallel = config.find(ParallelResidual)
        return self.norm_names[:1] if parallel and parallel.shared_norm else self.norm_names

    def mixer(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Mixer:
        return self.attention(config, dtype, f"{name}.{self.attention_name}")

    def mlp(self, config: ModelConfig, dtype: jax.typing.DTypeLike, name: str, index: int) -> Block:
        name = f"{name}.{self.mlp_name}"
        if has_experts(config, index):
            return self.experts(config, dtype, name, self.mlp_parts)
        if len(self.mlp_parts) == len(GATED):
            return self.gated_mlp(config, dtype, name, self.mlp_parts)
        up, down = self.mlp_parts
        return Mlp(config, dtype, f"{name}.{up}", f"{name}.{down}")

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """int32[N] -> [N, hidden]."""
        x = embed(self.embed[...], tokens)
        if self.config.embedding_multiplier == 1:
            return x
        return x * jnp.asarray(self.config.embedding_multiplier, x.dtype)

    def attending(self, positions: jax.Array, attend: Attend) -> Attend:
        """A family's change to what its layers attend with."""
        return attend

    def hidden_and_states(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, before: Sequence[int] = ()
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
        return self.hidden_and_states(tokens, positions, attend)[0]

    def enter(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """tokens and positions int32[N] -> [N, hidden], the input of the first layer."""
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
        """The input of the first of these layers, [N, hidden] -> the output of the last.

        Args:
            positions: int32[N], or int32[3, N] for images in a model with mrope.
            states: gets the input [N, hidden] of each layer that it has as a key.
            inputs: [N, layers, size], a further input of each layer.
        """
        attend, rotation = self.attending(positions, attend), self.rotations(positions)
        for i in layers:
            if states is not None and i in states:
                x = states[i] = array_of(x)
            further = () if inputs is None else (inputs[:, i],)
            x = self.layers[i](i, x, rotation(i), attend, *further)
            x = with_deeper_images(x, attend, i)
        return array_of(x)

    def rotations(self, positions: jax.Array) -> Callable[[int], Rotation | None]:
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
        """The output of the last layer -> hidden states for `logits`, [N, hidden]: the final norm."""
        return x if self.norm is None else self.norm(x)

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


def with_deeper_images(x: Stream, attend: Attend, layer: int) -> Stream:
    """The residual stream [N, hidden] after a layer, with an image's next level, if its rows have one more.

    The first level takes the place of a token's own embedding, see `layers.with_images`. Each of the others,
    of hidden size as well, is added after one of the first layers (DeepStack, Meng et al. 2024).
    """
    visual, hidden = getattr(attend, "visual", None), x.shape[1]
    if visual is None or (layer + 1) * hidden >= visual.rows.shape[1]:
        return x
    level = visual.rows[:, (layer + 1) * hidden : (layer + 2) * hidden]
    return Sum(x, jnp.where(visual.here[:, None], level, 0).astype(x.dtype))


def read_llama(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), **attention_biases(hf), "mlp_bias": bool(hf.get("mlp_bias", False))}


def read_smollm3(hf: Fields) -> dict[str, Any]:
    """Some layers do not rotate, by default every fourth."""
    layers, interval = int(hf["num_hidden_layers"]), int(hf.get("no_rope_layer_interval") or 4)
    # true for layers that rotate
    rotated = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"no_rope_layers has {len(rotated)} layers, num_hidden_layers is {layers}")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    types = ["full_attention" if window is None or rotated[i] else "sliding_attention" for i in range(layers)]
    fields, unrotated = read_llama(hf), tuple(i for i in range(layers) if not rotated[i])
    return {
        **fields,
        **windows_by_layer_types(hf, window, types),
        "rope": replace(fields["rope"], unrotated=unrotated),
    }


IMAGES = TextPart(("llama",), ("vision_model.", "connector."), "text_model.")
SMOLLM3 = {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
FAMILIES = {
    "idefics3": Family("Idefics3", Llama, read_llama, text_part=IMAGES),
    "llama": Family("Llama 2, 3, 3.1 and later", Llama, read_llama),
    "smollm3": Family("SmolLM3", Llama, read_smollm3, SMOLLM3),
    "smolvlm": Family("SmolVLM, SmolVLM2", Llama, read_llama, text_part=IMAGES),
}
