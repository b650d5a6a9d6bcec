"""EAGLE-3 (Li et al., 2025): a head of one Llama layer that drafts for a model. It reads a token's embedding,
and hidden states of several of the model's layers at the token before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.hf_config import attention_biases, decoder
from jengine.models.layers import (
    Attend,
    Attention,
    Matrix,
    RMSNorm,
    dense,
    exact_matrix,
    normed,
    param,
    vocabulary,
)
from jengine.models.llama import Llama
from jengine.models.pieces import Piece
from pallas_kernels.products.rows import Sum, array_of

STATES = 3  # of the model, if a configuration does not name their layers
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
LATER = ("norm_before_fc", "fc_norm", "norm_output")  # fields of later versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Head:
    """Marks the configuration of a head; its vocab_size is that of its drafts.

    Attributes:
        vocab_size, hidden_size: of the model.
        before: indices of the model's layers whose inputs it reads; the number of layers stands for the last
            one's result. Empty: vLLM's default.
        norm_before_residual: the residual stream begins with the normed state.
        own_embedding: it does not use the model's.
    """

    vocab_size: int
    hidden_size: int
    before: tuple[int, ...] = ()
    norm_before_residual: bool = False
    own_embedding: bool = False


class BothAttention(Attention):
    """Queries, keys and values are computed from an embedding and a state, one behind the other."""

    width = 2


class Eagle3(Llama):
    """EAGLE-3's head. At position 0 there is no token before, and its inputs are zeros."""

    prefix = ""
    attention = BothAttention
    only = ""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        super().__init__(config, dtype, max_model_len)
        part, hidden = config.part(Eagle3Head), config.hidden_size
        self.shared: tuple[str, ...] = () if part.own_embedding else ("embed",)
        self.reads = part.before
        table = dataclasses.replace(config, vocab_size=part.vocab_size)
        self.embed: Matrix = vocabulary(table, hidden, dtype, "embed_tokens.weight")
        self.hidden_norm = RMSNorm(hidden, config, dtype, f"{self.layer_name(config, 0)}.hidden_norm")
        read = len(part.before) * part.hidden_size
        self.fc = exact_matrix((hidden, read), dtype, (None, None), Piece("fc.weight", (hidden, read)))
        drafts = (config.vocab_size,)
        fewer = config.vocab_size < part.vocab_size
        self.offsets = param(drafts, jnp.int32, (None,), Piece("d2t", drafts)) if fewer else None

    def layer_name(self, config: ModelConfig, index: int) -> str:
        return "midlayer"

    def entering(self, states: Sequence[jax.Array]) -> jax.Array:
        return dense(jnp.concatenate(states, axis=-1), self.fc[...])

    def ahead(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, before: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        layer, real = self.layers[0], (positions > 0)[:, None]
        state = self.hidden_norm(before)
        x = state if self.config.part(Eagle3Head).norm_before_residual else before
        both = jnp.concatenate([layer.attention_norm(self.embedded(tokens)), state], axis=-1)
        x, both = jnp.where(real, x, 0), jnp.where(real, both, 0)
        attended = Sum(x, layer.attention(0, both, self.rope.cos_sin(positions), attend))
        x = array_of(Sum(attended, layer.mlp(normed(layer.mlp_norm, attended, layer.mlp))))
        return self.norm(x), x

    def ids(self, tokens: jax.Array) -> jax.Array:
        return tokens if self.offsets is None else tokens + self.offsets[...][tokens]


def read_eagle3(hf: Fields) -> dict[str, Any]:
    """Reads the layer's fields; `of_model` completes them."""
    fields = {**decoder(hf), **attention_biases(hf), "mlp_bias": bool(hf.get("mlp_bias", False))}
    for name in LATER:
        if hf.get(name):
            raise ModelError(f"{name} of EAGLE 3.1 is not supported")
    if fields["num_layers"] != 1:
        raise ModelError(f"num_hidden_layers={fields['num_layers']} must be 1 in an EAGLE-3 head")
    part = Eagle3Head(
        vocab_size=fields["vocab_size"],
        hidden_size=int(hf.get("target_hidden_size") or fields["hidden_size"]),
        before=_layers(hf),
        norm_before_residual=bool(hf.get("norm_before_residual", False)),
    )
    drafts = int(hf.get("draft_vocab_size") or fields["vocab_size"])
    return {**fields, "vocab_size": drafts, "tie_embeddings": False, "windows": (), "parts": (part,)}


def _layers(hf: Fields) -> tuple[int, ...]:
    """Layers whose inputs are read. Ids of eagle_config, which SGLang and ModelOpt write, name the layers
    whose results these are.
    """
    if ids := hf.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(i) for i in ids)
    nested = hf.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise ModelError("use_aux_hidden_state=false is not supported: it is a head of EAGLE 1")
    return tuple(int(i) + 1 for i in nested.get("eagle_aux_hidden_state_layer_ids") or ())


def of_model(head: ModelConfig, num_layers: int, own_embedding: bool) -> ModelConfig:
    """The head's configuration, completed by what its model's and the checkpoint say."""
    part = head.part(Eagle3Head)
    usual = 2, num_layers // 2, num_layers - STATES
    part = dataclasses.replace(part, before=part.before or usual, own_embedding=own_embedding)
    return dataclasses.replace(head, parts=(part,))


def _unread(config: ModelConfig) -> frozenset[str]:
    part, names = config.part(Eagle3Head), set[str]()
    if not part.own_embedding:
        names.add("embed_tokens.weight")
    if config.vocab_size == part.vocab_size:
        names.add("d2t")
    return frozenset(names)


DRAFT_HEADS = {
    "eagle3": Family(
        "EAGLE-3",
        Eagle3,
        read_eagle3,
        parts=(Eagle3Head,),
        renamed={"layers.0.": "midlayer."},
        unread=_unread,
    )
}
