"""Decoders as a pass over layers. Each stage of a pipeline makes a part of this pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jengine.models.layers import Attend
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import Sum, array_of


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


def with_deeper_images(x: jax.Array | Sum, attend: Attend, layer: int) -> jax.Array | Sum:
    """The residual stream [N, hidden] after a layer, with an image's next level, if its rows have one more.

    The first level takes the place of a token's own embedding, see `layers.with_images`. Each of the others,
    of hidden size as well, is added after one of the first layers (DeepStack, Meng et al. 2024).
    """
    visual, hidden = getattr(attend, "visual", None), x.shape[1]
    if visual is None or (layer + 1) * hidden >= visual.rows.shape[1]:
        return x
    level = visual.rows[:, (layer + 1) * hidden : (layer + 2) * hidden]
    return Sum(x, jnp.where(visual.here[:, None], level, 0).astype(x.dtype))
