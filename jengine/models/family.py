"""A model family: the reader of its config.json, and its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.models.config import ModelConfig
from jengine.models.layers import Attend, Matrix


class Decoder(Protocol):
    """A decoder-only transformer on a flat token axis, as an nnx.Module."""

    prefix: str  # of all tensor names except the output head's; checkpoints of the bare decoder lack it
    head: tuple[str, ...]  # attributes that only `logits` uses
    layers: nnx.List[Any]  # each has an `attention`, which is a layers.Mixer
    embed: Matrix  # a vector for each token
    lm_head: Matrix | None  # None: `logits` uses embed

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """tokens and positions int32[N] -> [N, hidden], after the final norm."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, hidden] -> float32[N, vocab], with vocab padded to a multiple of the devices. Each device has
        its own columns.
        """


class Head(Decoder, Protocol):
    """One layer that drafts for a model. Its hidden state at a token's position follows from this token and
    the model's states at the token before, and gives the next token.
    """

    shared: tuple[str, ...]  # attributes with the model's own parameters
    only: str  # prefix of its tensors in the model's checkpoint; "": it has a checkpoint of its own
    reads: tuple[int, ...]  # the model's layers whose inputs it reads; (): hidden states after the norm

    def entering(self, states: Sequence[jax.Array]) -> jax.Array:
        """The model's states that it reads, [N, hidden] each -> [N, hidden], the head's `before`."""

    def ahead(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, before: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """tokens and positions int32[N], before [N, hidden] of the tokens before -> the states for `logits`,
        and those that are `before` at the next position, if the model's are not known. Both [N, hidden].
        """

    def ids(self, tokens: jax.Array) -> jax.Array:
        """Columns of `logits`, int32[N] -> the model's tokens."""


class Fields(dict[str, Any]):
    """The fields of a config.json. Records which fields were read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)

    def rename(self, **names: str) -> None:
        """Gives fields under Llama's names the values of these others. Raises KeyError if one is missing."""
        self.update({ours: self[theirs] for ours, theirs in names.items()})


# Family.renamed of text models: loaded from a whole model, transformers saves them with its names.
OF_WHOLE = {"model.language_model.": "model."}


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text model of a model with several parts, such as a vision model. Only the text model is served.

    config.json has the text model's fields under text_config, and the checkpoint has its tensors under
    `name`.

    Attributes:
        model_types: model types that text_config may have; the first is the default.
        skipped: prefixes of the tensor names of other parts.
        name: the prefix of the text model's tensors.
        why: why other parts are not loaded; "": they are.
        tied: the default of the whole model's tie_word_embeddings, which counts for transformers; None: the
            text model's counts.
        inline: in older configurations the text model's fields are the whole model's.
        tied_before_5: the default in configurations that transformers has written before version 5, if it was
            another one.
    """

    model_types: tuple[str, ...]
    skipped: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    name: str = "language_model."
    why: str = "only text is supported"
    tied: bool | None = False
    inline: bool = False
    tied_before_5: bool | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """The implementation of a model_type.

    Attributes:
        title: names of the models, for documentation.
        module: makes a Decoder from a ModelConfig, a dtype and max_model_len.
        read: converts the fields of config.json to those of ModelConfig, except family, dtype and
            eos_token_ids. It raises ModelError if a setting is not supported, KeyError if a field is missing.
        defaults: values of optional config.json fields for which transformers' default differs from Llama's.
        text_part: the text model of a model with several parts; None for a model that is only a text model.
        skipped: prefixes of the names of tensors that are not served, such as those of multi-token
            prediction; {num_layers} stands for the number of layers.
        parts: types of ModelConfig.parts that `read` may give.
        unread: names of tensors that checkpoints may contain but this model never reads.
        renamed: prefixes of tensor names that some checkpoints have in place of others.
    """

    title: str
    module: Callable[[ModelConfig, jnp.dtype, int], Decoder]
    read: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_part: TextPart | None = None
    skipped: tuple[str, ...] = ()
    parts: tuple[type[Any], ...] = ()
    unread: Callable[[ModelConfig], frozenset[str]] = field(default=lambda config: frozenset())
    renamed: Mapping[str, str] = field(default_factory=dict)
