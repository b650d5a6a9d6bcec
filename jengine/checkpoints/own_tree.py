"""Weights in memory that are parameters already: a tree like `Model.params`, such as a trainer that runs the
model's own functions has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jengine.base.errors import ModelError
from jengine.checkpoints.in_memory import PLACE, Tensors
from jengine.checkpoints.orbax import by_name
from jengine.checkpoints.quantization import Parameter, Target, fitted, placed, plain
from jengine.checkpoints.stored import Tensor
from jengine.models import Model, Params
from jengine.models.pieces import Piece


def own_names(model: Model, tensors: Tensors) -> bool:
    """Whether names are those of parameters, such as layers.0.mlp.down, rather than of a checkpoint."""
    pieces = jax.tree.leaves(model.sources, is_leaf=lambda node: isinstance(node, Piece))
    parameters, stored = by_name(model.params).keys(), {piece.name for piece in pieces}
    return len(parameters & tensors.keys()) > len(stored & tensors.keys())


def own_makers(targets: Params, tensors: Tensors) -> list[Callable[[], Parameter]]:
    """Makers as of `weights.makers`. A JAX array with a parameter's shape, dtype and sharding becomes the
    parameter itself, without a copy. Others are copied through the host. Quantized parameters are quantized
    from plain ones.

    Raises:
        ModelError: a parameter is missing, unknown, or has another shape or dtype.
    """
    parameters = by_name(targets)
    for name, target in parameters.items():
        if name not in tensors:
            raise ModelError("is missing", file=PLACE, tensor=name)
        array, wanted = tensors[name].array, plain(target)
        if array.shape != wanted.shape:
            reason = f"has shape {list(array.shape)}; the model needs {list(wanted.shape)}"
            raise ModelError(reason, file=PLACE, tensor=name)
        if array.dtype != wanted.dtype:
            raise ModelError(
                f"has dtype {array.dtype}; the model needs {wanted.dtype}", file=PLACE, tensor=name
            )
    for name in tensors:
        if name not in parameters:
            raise ModelError("is not part of this model", file=PLACE, tensor=name)
    return [partial(_made, target, tensors[name]) for name, target in parameters.items()]


def _made(target: Target, tensor: Tensor) -> Parameter:
    array, wanted = tensor.array, plain(target)
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(wanted.sharding, array.ndim):
        return fitted(jax.device_put(array, wanted.sharding), target)
    # Between devices, JAX would compile slices of each shape. A copy: a CPU device may take over its memory.
    return fitted(placed(np.array(array), wanted), target)
