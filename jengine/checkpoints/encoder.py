"""Loads the weights of the encoder of images from a model's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoints.files import found_tensors
from jengine.checkpoints.in_memory import PLACE, Tensors
from jengine.checkpoints.weights import check_tensors, is_source, place_whole
from jengine.models.pieces import pieces_of

WRAPPED = "vision_tower.vision_model.", "vision_tower."  # in older checkpoints, and now


def load_encoder(path: Path, targets: Any, sources: Any, tensors: Tensors | None = None) -> Any:
    """The parameters as arrays on the devices.

    Args:
        targets: abstract arrays with shardings.
        sources: pieces for each of them. Names lack the prefix "model." that some checkpoints have.
        tensors: tensors in place of those in the folder's files.

    Raises:
        ModelError: a tensor is missing, or has another shape.
    """
    mine = _mine(found_tensors(path, tensors), sources)
    made = [make() for make in _makers(path if tensors is None else PLACE, targets, sources, mine)]
    return jax.tree.unflatten(jax.tree.structure(targets), made)


def encoder_makers(targets: Any, sources: Any, tensors: Tensors) -> list[Callable[[], jax.Array]] | None:
    """For each parameter, in the order of the tree's leaves, a function that makes it on the devices. None:
    the given tensors have none of the encoder.

    Args, and Raises: as `load_encoder`.
    """
    mine = _mine(tensors, sources)
    return _makers(PLACE, targets, sources, mine) if mine else None


def _mine(every: Tensors, sources: Any) -> Tensors:
    """All tensors of the encoder's modules, also those that it does not have."""
    modules = {piece.name.partition(".")[0] for piece in pieces_of(sources)}
    tensors = {name.removeprefix("model."): tensor for name, tensor in every.items()}
    return {
        name.replace(*WRAPPED): tensor
        for name, tensor in tensors.items()
        if name.partition(".")[0] in modules
    }


def _makers(place: Path, targets: Any, sources: Any, mine: Tensors) -> list[Callable[[], jax.Array]]:
    check_tensors(place, dict(mine), pieces_of(sources), tied=False, integers=set())
    leaves = zip(jax.tree.leaves(targets), jax.tree.leaves(sources, is_leaf=is_source), strict=True)
    return [partial(place_whole, target, source, mine) for target, source in leaves]
