"""Alternatives to `Layer` for adding attention and MLP to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jengine.models.layers import Attend, Attention, Block, Layer, Stream, normed
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.products.rows import array_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelResidual:
    """Attention and MLP of a layer read the same input, and both results are added to it.

    Attributes:
        shared_norm: they share one norm.
    """

    shared_norm: bool


class SandwichLayer(Layer):
    """Norms the inputs and the results of attention and MLP."""

    def __init__(
        self,
        attention_norm: Block,
        attention: Attention,
        attention_result_norm: Block,
        mlp_norm: Block,
        mlp: Block,
        mlp_result_norm: Block,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp)
        self.attention_result_norm, self.mlp_result_norm = attention_result_norm, mlp_result_norm

    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = array_of(x)
        x = x + self.attention_result_norm(
            self.attention(layer, normed(self.attention_norm, x, self.attention), rotation, attend)
        )
        return x + self.mlp_result_norm(self.mlp(normed(self.mlp_norm, x, self.mlp)))


class ResultNormLayer(Layer):
    """Norms only the results of attention and MLP."""

    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = array_of(x)
        x = x + self.attention_norm(self.attention(layer, x, rotation, attend))
        return x + self.mlp_norm(self.mlp(x))


class ParallelLayer(Layer):
    """Attention and MLP read the same input; they may share one norm."""

    parallel = True

    def __call__(self, layer: int, x: Stream, rotation: Rotation | None, attend: Attend) -> jax.Array:
        x = array_of(x)
        return (
            x + self.attention(layer, self.attention_norm(x), rotation, attend) + self.mlp(self.mlp_norm(x))
        )
