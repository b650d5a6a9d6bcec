"""Model families: functions of arrays that are given `attend`, with every weight declared once.

A new family is a module here, named in FAMILIES by Hugging Face's model_type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jengine.config import ModelConfig
from jengine.errors import ModelError
from jengine.models.layers import ACTIVATIONS
from jengine.models.llama import Llama
from jengine.models.qwen3 import Qwen3

Params = Any  # nested dicts of arrays, as `Model.params` describes them
FAMILIES: dict[str, type[Llama]] = {"llama": Llama, "qwen3": Qwen3}


@dataclass(frozen=True, slots=True)
class Model:
    """A model without its weights. The three trees have one structure: nested dicts.

    Attributes:
        params: what programs take: a jax.ShapeDtypeStruct for each parameter.
        axes: each parameter's logical axis names, a tuple of str or None.
        sources: the checkpoint tensors each parameter is made of, a tuple of layers.Piece.
    """

    config: ModelConfig
    dtype: jnp.dtype
    params: Params
    axes: Any
    sources: Any
    graph: nnx.GraphDef[Llama] = field(repr=False)

    def bind(self, params: Params) -> Llama:
        """The module over these parameters, inside a traced function or outside."""
        return nnx.merge(self.graph, params)


def build(config: ModelConfig, dtype: jax.typing.DTypeLike, max_model_len: int) -> Model:
    """Declares the model of a family; allocates nothing.

    Args:
        dtype: of weights and activations.
        max_model_len: tokens a sequence may have; dynamic rotary scaling is fixed for it.

    Raises:
        ModelError: the family or its activation is not supported.
    """
    if config.family not in FAMILIES:
        raise ModelError(f"model_type {config.family!r} is not supported; {', '.join(sorted(FAMILIES))} are")
    if config.activation not in ACTIVATIONS:
        raise ModelError(f"hidden_act {config.activation!r} is not supported; {', '.join(sorted(ACTIVATIONS))} is")
    graph, state = nnx.split(FAMILIES[config.family](config, jnp.dtype(dtype), max_model_len))

    def tree(leaf: Any) -> Any:
        return nnx.to_pure_dict(nnx.map_state(lambda _, parameter: leaf(parameter), state))

    return Model(
        config=config,
        dtype=jnp.dtype(dtype),
        params=nnx.to_pure_dict(state),
        axes=tree(lambda p: p.get_metadata("axes")),
        sources=tree(lambda p: p.get_metadata("source")),
        graph=graph,
    )
