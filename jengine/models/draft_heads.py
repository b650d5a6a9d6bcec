"""Heads that draft: one layer that reads a token's embedding, and hidden states of a model at the token
before it.

EAGLE-3 (Li et al., 2025) reads states of several layers. Multi-token prediction (MTP; DeepSeek-V3, 2024) is a
layer behind the model's last, which reads the last state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jengine.base.errors import ModelError
from jengine.models import deepseek, glm, qwen3_next
from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields, TextPart
from jengine.models.hf_config import decoder
from jengine.models.layers import (
    Attend,
    Attention,
    Matrix,
    RMSNorm,
    dense,
    normed,
    param,
    vocabulary,
    whole_matrix,
)
from jengine.models.llama import Llama, read_llama
from jengine.models.moe import MixtureOfExperts
from jengine.models.pieces import Piece
from jengine.models.recurrent import LinearAttention
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
        self.fc = whole_matrix("fc.weight", dtype, hidden, read, exact=True)
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
        return self.leave(x), x

    def ids(self, tokens: jax.Array) -> jax.Array:
        return tokens if self.offsets is None else tokens + self.offsets[...][tokens]


def read_eagle3(hf: Fields) -> dict[str, Any]:
    """Reads the layer's fields; `of_model` completes them."""
    fields = read_llama(hf)
    for name in LATER:
        if hf.get(name):
            raise ModelError(f"{name} of EAGLE 3.1 is not supported")
    if fields["num_layers"] != 1:
        raise ModelError(f"num_hidden_layers={fields['num_layers']} must be 1 in an EAGLE-3 head")
    part = Eagle3Head(
        vocab_size=fields["vocab_size"],
        hidden_size=int(hf.get("target_hidden_size") or fields["hidden_size"]),
        before=_eagle3_layers(hf),
        norm_before_residual=bool(hf.get("norm_before_residual", False)),
    )
    drafts = int(hf.get("draft_vocab_size") or fields["vocab_size"])
    return {**fields, "vocab_size": drafts, "tie_embeddings": False, "windows": (), "parts": (part,)}


def _eagle3_layers(hf: Fields) -> tuple[int, ...]:
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


def _eagle3_unread(config: ModelConfig) -> frozenset[str]:
    part, names = config.part(Eagle3Head), set[str]()
    if not part.own_embedding:
        names.add("embed_tokens.weight")
    if config.vocab_size == part.vocab_size:
        names.add("d2t")
    return frozenset(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Marks the configuration of an MTP head, which is that of its model with one layer.

    Attributes:
        layers: number of layers of the model.
    """

    layers: int


class Mtp(Llama):
    """A head, as a mixin for the model of its family, whose layer it has. See family.Head.

    The model's embedding and output head are its own, too. At position 0 there is no token before, and
    its inputs are zeros.

    Attributes:
        only: the prefix of its tensors, with {layers} for the number of layers. The other names follow it.
        inner: the prefix of its layer's.
        embedding_norm_name, hidden_norm_name: norms of its two inputs.
        joined_name: the product of both inputs.
        norm_name: the norm before the output head.
        repeated: tensors that repeat some of the model's.
    """

    prefix = ""
    only, inner = "model.layers.{layers}.", ""  # a layer behind the last
    embedding_norm_name, hidden_norm_name, joined_name = "enorm", "hnorm", "eh_proj"
    norm_name = "shared_head.norm"
    repeated: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")
    shared: tuple[str, ...] = ("embed", "lm_head", "head_bias")
    reads: tuple[int, ...] = ()
    embedding_first = True  # in the product of both inputs
    feeds_norm = True  # the next draft's input is the result of the norm

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        self.only, hidden = self.prefix_of(config), config.hidden_size
        self.norm_name = self.only + self.norm_name
        super().__init__(config, dtype, max_model_len)
        self.embedding_norm, self.hidden_norm = (
            self.norm_type(hidden, config, dtype, self.only + name)
            for name in (self.embedding_norm_name, self.hidden_norm_name)
        )
        # never quantized: no published checkpoint does so
        joined = f"{self.only}{self.joined_name}.weight"
        self.joined = whole_matrix(joined, dtype, hidden, 2 * hidden, exact=True)

    @classmethod
    def prefix_of(cls, config: ModelConfig) -> str:
        """The prefix of a head's tensors in the model's checkpoint."""
        return cls.only.format(layers=config.part(Ahead).layers)

    def layer_name(self, config: ModelConfig, index: int) -> str:
        return f"{self.only}{self.inner}".removesuffix(".")

    def entering(self, states: Sequence[jax.Array]) -> jax.Array:
        (hidden,) = states
        return hidden

    def ahead(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, before: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        inputs = [self.embedding_norm(self.embedded(tokens)), self.hidden_norm(before)]
        both = jnp.concatenate(inputs if self.embedding_first else inputs[::-1], axis=-1)
        x = jnp.where((positions > 0)[:, None], dense(both, self.joined[...]), 0)
        x = array_of(self.layers[0](0, x, self.rope.cos_sin(positions), attend))
        normed = self.leave(x)
        return normed, normed if self.feeds_norm else x

    def ids(self, tokens: jax.Array) -> jax.Array:
        return tokens


def head_of(title: str, module: type[Mtp], family: Family) -> Family:
    """The head's Family, from that of its model."""

    def of_one_layer(part: Any) -> Any:
        if isinstance(part, MixtureOfExperts):
            return dataclasses.replace(part, layers=(0,) if part.layers else ())
        return dataclasses.replace(part, layers=()) if isinstance(part, LinearAttention) else part

    def read(hf: Fields) -> dict[str, Any]:
        fields = family.read(hf)
        parts = *map(of_one_layer, fields.get("parts", ())), Ahead(layers=fields["num_layers"])
        return {**fields, "num_layers": 1, "windows": (), "parts": parts}

    def unread(config: ModelConfig) -> frozenset[str]:
        return frozenset(module.prefix_of(config) + name for name in module.repeated)

    return dataclasses.replace(
        family,
        title=title,
        module=module,
        read=read,
        skipped=(),
        parts=(*family.parts, Ahead),
        unread=unread,
    )


class MimoMtp(Mtp):
    """A layer of MiMo, which has Qwen2's."""

    only = "model.mtp_layers.0."
    embedding_norm_name, hidden_norm_name, joined_name = "token_layernorm", "hidden_layernorm", "input_proj"
    norm_name, repeated = "final_layernorm", ()
    embedding_first = False


class DeepseekMtp(Mtp, deepseek.Deepseek):
    """A layer with latent attention and experts."""

    feeds_norm = False


class Glm4MoeMtp(Mtp, glm.Glm4Moe):
    """A layer with experts."""

    feeds_norm = False


class Qwen3NextMtp(Mtp, qwen3_next.Qwen3Next):
    """A layer with gated attention."""

    only, inner = "mtp.", "layers.0."
    embedding_norm_name, hidden_norm_name, joined_name = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"
    norm_name, repeated = "norm", ()


def read_mimo(hf: Fields) -> dict[str, Any]:
    return {**decoder(hf), "qkv_bias": bool(hf.get("attention_bias", True))}


FAMILIES = {"mimo": Family("MiMo", Llama, read_mimo, skipped=("model.mtp_layers.",))}
DRAFT_HEADS = {
    "eagle3": Family(
        "EAGLE-3",
        Eagle3,
        read_eagle3,
        parts=(Eagle3Head,),
        renamed={"layers.0.": "midlayer."},
        unread=_eagle3_unread,
    ),
    "glm4_moe_mtp": head_of("GLM-4.5 and later", Glm4MoeMtp, glm.FAMILIES["glm4_moe"]),
    "mimo_mtp": head_of("MiMo", MimoMtp, FAMILIES["mimo"]),
    **{
        f"{name}_mtp": head_of("DeepSeek V3 and alike", DeepseekMtp, deepseek.FAMILIES[name])
        for name in ("deepseek_v3", "glm4_moe_lite", "kimi_k2")
    },
    **{
        f"{name}_mtp": dataclasses.replace(
            head_of("Qwen3-Next, Qwen3.5 and Qwen3.6", Qwen3NextMtp, family),
            text_part=family.text_part and TextPart(family.text_part.model_types, ("visual.",)),
        )
        for name, family in qwen3_next.FAMILIES.items()
    },
}
