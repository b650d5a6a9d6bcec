"""Parameters as an Orbax checkpoint: written one batch at a time, restored directly into their shardings.

The checkpoint is a flat dict of arrays by name, such as layers.0.attention.qkv. Saving and loading work in
batches: each call has a fixed cost, and the host only holds a batch. Arrays are not compressed: weights
hardly shrink, and would load more slowly.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.base.errors import ModelError
from jengine.base.model_files import check_regular
from pallas_kernels.products.weights import is_weight

BATCH = 64 * 2**20  # bytes; the parameter that fills a batch may be larger


def by_name(tree: Any, is_leaf: Callable[[Any], bool] = is_weight) -> dict[str, Any]:
    """Flattens nested dicts of parameters, with keys joined by dots."""
    paths, _ = jax.tree.flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def save(folder: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes a new checkpoint. Arrays are requested one by one, and held until their batch is written.

    Raises:
        ModelError: it cannot be written.
    """
    from orbax.checkpoint import v1 as ocp  # slow to import

    folder = folder.absolute()  # required by Orbax
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    with context:
        for batch in _batches(arrays):
            with _failing("cannot be written", folder):
                ocp.partial.save(folder, batch)
        with _failing("cannot be written", folder):
            ocp.partial.finalize(folder)


def restore(
    folder: Path, stored: Any, finish: Callable[[str, jax.Array], Any], count: Callable[[int], object]
) -> Any:
    """Restores a tree like `stored`, with `finish` applied to each array.

    Args:
        stored: nested dicts of jax.ShapeDtypeStruct with shardings: the stored arrays, and where to place
            them.
        finish: converts a parameter, given its name and array, to the form that programs use.
        count: called after each batch with its number of bytes.

    Raises:
        ModelError: there is no complete checkpoint, or it has other parameters.
    """
    from orbax.checkpoint import v1 as ocp

    folder = folder.absolute()
    if not folder.is_dir():
        raise ModelError("is missing", file=folder)
    check_regular(folder)
    wanted = by_name(stored)
    with _failing("is not a complete Orbax checkpoint", folder):
        saved = ocp.metadata(folder).metadata
        if saved is None:
            raise ValueError("its metadata is missing or damaged")
    _check(folder, by_name(saved), wanted)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    arrays: dict[str, Any] = {}
    with context:
        for batch in _batches(wanted.items()):
            with _failing("is not a complete Orbax checkpoint", folder):
                loaded = jax.block_until_ready(ocp.load(folder, batch))
            done = {name: finish(name, array) for name, array in loaded.items()}
            arrays |= done
            gc.collect(0)  # JAX frees the host's copies in Python's garbage collection
            count(sum(array.nbytes for array in jax.tree.leaves(done)))
    return jax.tree.unflatten(jax.tree.structure(stored), [arrays[name] for name in wanted])


def _batches(items: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Dicts of arrays, or of their descriptions. Each dict is emptied when the next one is requested."""
    batch: dict[str, Any] = {}
    held = 0
    for name, item in items:
        batch[name] = item
        held += item.size * item.dtype.itemsize
        del item  # otherwise it would outlive its batch
        if held >= BATCH:
            yield batch
            batch.clear()
            held = 0
    if batch:
        yield batch


@contextlib.contextmanager
def _failing(reason: str, folder: Path) -> Iterator[None]:
    """Orbax's errors have no common base class, and may be pages long."""
    try:
        yield
    except jax.errors.JaxRuntimeError:  # errors of a device, such as too little memory
        raise
    except Exception as error:
        cause = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{reason}: {cause}", file=folder) from error


def _check(folder: Path, saved: dict[str, Any], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ModelError if a folder lacks parameters, or another version of jengine wrote other shapes."""
    for name, leaf in wanted.items():
        if name not in saved:
            raise ModelError("is missing; convert the model again", file=folder, tensor=name)
        if tuple(saved[name].shape) != leaf.shape:
            reason = f"has shape {list(saved[name].shape)}; the configuration needs {list(leaf.shape)}"
            raise ModelError(reason, file=folder, tensor=name)
    for name in saved:
        if name not in wanted:
            raise ModelError("is not part of this model; convert it again", file=folder, tensor=name)
