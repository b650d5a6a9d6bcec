"""Loads the weights of the encoder of images from a model's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jengine.checkpoints.in_memory import Tensors
from jengine.checkpoints.weights import check_tensors, found_tensors, is_source, place_whole
from jengine.models.pieces import Piece


def load_encoder(path: Path, targets: Any, sources: Any, given: Tensors | None = None) -> Any:
    """The parameters as arrays on the devices.

    Args:
        targets: abstract arrays with shardings.
        sources: pieces for each of them. Names lack the prefix "model." that some checkpoints have.
        given: tensors in place of those in the folder's files.

    Raises:
        ModelError: a tensor is missing, or has another shape.
    """
    pieces = jax.tree.leaves(sources, is_leaf=lambda node: isinstance(node, Piece))
    names = {piece.name for piece in pieces}
    every = found_tensors(path, given)
    tensors = {name.removeprefix("model."): tensor for name, tensor in every.items()}
    mine = {name: tensor for name, tensor in tensors.items() if name in names}
    check_tensors(path, mine, pieces, tied=False, integers=set())
    leaves = zip(jax.tree.leaves(targets), jax.tree.leaves(sources, is_leaf=is_source), strict=True)
    made = [place_whole(target, source, mine) for target, source in leaves]
    return jax.tree.unflatten(jax.tree.structure(targets), made)
