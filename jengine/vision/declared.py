"""The weights of an encoder, as its module declares them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.base.model_files import malformed
from jengine.vision.family import RowEncoder


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder without its weights. params, axes and sources are nested dicts with the same structure, as
    those of `models.Model`.
    """

    vision: RowEncoder = field(compare=False)
    facts: dict[str, Any]
    dtype: jnp.dtype
    params: Any
    axes: Any
    sources: Any
    graph: nnx.GraphDef[Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, vision: RowEncoder, dtype: jax.typing.DTypeLike) -> Encoder:
        """
        Raises:
            ModelError: a field of vision_config is missing, or has the wrong type or value.
        """
        with malformed("vision_config in config.json"):
            graph, state = nnx.split(vision.module(jnp.dtype(dtype)))

        def tree(leaf: Any) -> Any:
            return nnx.to_pure_dict(nnx.map_state(lambda _, parameter: leaf(parameter), state))

        return cls(
            vision=vision,
            facts=vision.facts(),
            dtype=jnp.dtype(dtype),
            params=tree(lambda p: p.get_value()),
            axes=tree(lambda p: p.get_metadata("axes")),
            sources=tree(lambda p: p.get_metadata("source")),
            graph=graph,
        )

    def __call__(self, params: Any, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        return self.vision.encode(nnx.merge(self.graph, params), pixels, places, segments)
