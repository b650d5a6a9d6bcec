"""A model family: how its config.json is read, and the module that this describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jengine.model_config import ModelConfig
from jengine.models.layers import Attend


class Decoder(Protocol):
    """A decoder-only transformer, on one flat token axis; an nnx.Module."""

    prefix: str  # of the names of all tensors but the output head's; checkpoints of the bare decoder lack it

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """tokens and positions int32[N] -> [N, hidden], after the final norm."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[N, hidden] -> float32[N, vocab], padded to a multiple of the devices; each device's own columns."""


class Fields(dict[str, Any]):
    """A config.json's fields; remembers which were read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A model of several parts, such as one that sees images, of which the text model is served.

    Its config.json has the text model's fields under text_config, and its checkpoint that model's tensors under language_model.

    Attributes:
        model_types: those that text_config may have; the first one if it has none.
        skipped: names that begin with one of these are tensors of other parts.
    """

    model_types: tuple[str, ...]
    skipped: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type stands for.

    Attributes:
        title: its models, for people.
        module: makes a Decoder from a ModelConfig, a dtype and max_model_len.
        read: from a config.json's fields to those of ModelConfig, without family, dtype and eos_token_ids. It raises
            ModelError where they ask for what is not supported, KeyError where one is missing.
        defaults: fields that config.json may leave out, where transformers fills in another value than for Llama.
        text_part: of a model of several parts; None where the text model is all.
        skipped: names that begin with one of these are tensors of what is not served, such as layers that predict tokens further ahead;
            {num_layers} stands for the number of layers.
        eight_bit_cache: whether keys may be rounded to eight bits.
        unread: names of tensors that checkpoints may have and this model never reads.
    """

    title: str
    module: Callable[[ModelConfig, jnp.dtype, int], Decoder]
    read: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_part: TextPart | None = None
    skipped: tuple[str, ...] = ()
    eight_bit_cache: bool = True
    unread: Callable[[ModelConfig], frozenset[str]] = field(default=lambda config: frozenset())
