"""Multi-token prediction (MTP): a layer behind a model's last that predicts one token further (DeepSeek-V3,
2024). It drafts: its input is a token's embedding, and the model's hidden state at the token before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jengine.models.config import ModelConfig
from jengine.models.family import Family, Fields
from jengine.models.layers import Attend, dense, exact_matrix
from jengine.models.llama import Llama
from jengine.models.moe import MixtureOfExperts
from jengine.models.pieces import Piece
from jengine.models.recurrent import LinearAttention
from pallas_kernels.products.rows import array_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Marks the configuration of an MTP head, which is that of its model with one layer.

    Attributes:
        layers: number of layers of the model.
    """

    layers: int


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a head's tensors.

    Attributes:
        head: the prefix that all of them have.
        layer: the prefix of its layer's.
        embedding_norm, hidden_norm: norms of its two inputs.
        joined: the product of both inputs.
        norm: the norm before the output head.
        unread: tensors that repeat some of the model's.
    """

    head: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    joined: str
    norm: str
    unread: tuple[str, ...] = ()


class Mtp(Llama):
    """A head, as a mixin for the model of its family, whose layer it has. See family.Head.

    The model's embedding and output head are its own, too. At position 0 there is no token before, and
    its inputs are zeros.
    """

    prefix = ""
    shared: tuple[str, ...] = ("embed", "lm_head", "head_bias")
    reads: tuple[int, ...] = ()
    embedding_first = True  # in the product of both inputs
    feeds_norm = True  # the next draft's input is the result of the norm

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> None:
        names, hidden = self.names(config.part(Ahead).layers), config.hidden_size
        self.norm_name, self.only = names.norm, names.head
        super().__init__(config, dtype, max_model_len)
        self.embedding_norm = self.norm_type(hidden, config, dtype, names.embedding_norm)
        self.hidden_norm = self.norm_type(hidden, config, dtype, names.hidden_norm)
        source = Piece(f"{names.joined}.weight", (hidden, 2 * hidden))
        # never quantized: no published checkpoint does so
        self.joined = exact_matrix((hidden, 2 * hidden), dtype, (None, None), source)

    @staticmethod
    def names(layers: int) -> Names:
        """The names for a model with so many layers."""
        raise NotImplementedError

    def layer_name(self, config: ModelConfig, index: int) -> str:
        return self.names(config.part(Ahead).layers).layer

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
        normed = self.norm(x)
        return normed, normed if self.feeds_norm else x

    def ids(self, tokens: jax.Array) -> jax.Array:
        return tokens


def head_of(title: str, module: type[Mtp], family: Family) -> Family:
    """The head's Family, from that of its model."""

    def unread(config: ModelConfig) -> frozenset[str]:
        return frozenset(module.names(config.part(Ahead).layers).unread)

    return dataclasses.replace(
        family,
        title=title,
        module=module,
        read=_one_layer(family.read),
        skipped=(),
        parts=(*family.parts, Ahead),
        unread=unread,
    )


def _one_layer(read: Callable[[Fields], dict[str, Any]]) -> Callable[[Fields], dict[str, Any]]:
    def changed(part: Any) -> Any:
        if isinstance(part, MixtureOfExperts):
            return dataclasses.replace(part, layers=(0,) if part.layers else ())
        return dataclasses.replace(part, layers=()) if isinstance(part, LinearAttention) else part

    def one(hf: Fields) -> dict[str, Any]:
        fields = read(hf)
        parts = *map(changed, fields.get("parts", ())), Ahead(layers=fields["num_layers"])
        return {**fields, "num_layers": 1, "windows": (), "parts": parts}

    return one
