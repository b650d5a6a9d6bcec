"""Decoders as a pass over layers. Each stage of a pipeline makes a part of this pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jengine.models.layers import Attend
from jengine.models.visual import with_deeper_images
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import array_of


class Layered(Protocol):
    """A decoder whose layers read nothing but the hidden states before them, and the cache.

    Attributes:
        entry: attributes that only `enter` uses, or `enter` and `logits`.
        indivisible: why stages cannot divide its layers; "": they can.
    """

    entry: tuple[str, ...]
    indivisible: str
    layers: Any

    def enter(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """tokens and positions int32[N] -> [N, hidden], the input of the first layer."""

    def through(self, x: Any, positions: jax.Array, attend: Attend, layers: range) -> jax.Array:
        """The input of the first of these layers, [N, hidden] -> the output of the last.

        Args:
            positions: int32[N], or int32[3, N] for images in a model with mrope.
        """

    def leave(self, x: jax.Array) -> jax.Array:
        """The output of the last layer -> hidden states for `logits`, [N, hidden]: the final norm."""


def unrotated(layer: int) -> Rotation | None:
    return None


def in_order(
    decoder: Layered,
    x: Any,
    attend: Attend,
    layers: range,
    rotation: Callable[[int], Rotation | None] = unrotated,
    *,
    states: dict[int, Any] | None = None,
    inputs: jax.Array | None = None,
) -> jax.Array:
    """`through`: calls these layers one after the other.

    Args:
        rotation: of a layer's queries and keys.
        states: gets the input [N, hidden] of each layer that it has as a key.
        inputs: [N, layers, size], a further input of each layer.
    """
    for i in layers:
        if states is not None and i in states:
            x = states[i] = array_of(x)
        further = () if inputs is None else (inputs[:, i],)
        x = decoder.layers[i](i, x, rotation(i), attend, *further)
        x = with_deeper_images(x, attend, i)
    return array_of(x)


def whole_pass(decoder: Layered, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    """All of it: tokens and positions int32[N] -> [N, hidden], after the final norm."""
    x = decoder.enter(tokens, positions, attend)
    x = decoder.through(x, positions, attend, range(len(decoder.layers)))
    return decoder.leave(x)
