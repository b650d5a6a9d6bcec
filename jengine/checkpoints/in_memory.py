"""Weights in memory in place of a checkpoint's files, and parameters assembled on the devices from JAX
arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.layouts import LeafTensor
from jengine.checkpoints.safetensors import DTYPES, READABLE
from jengine.checkpoints.stored import Tensor
from jengine.models.pieces import Piece

PLACE = Path("params")  # in errors, the place of the file
Tensors = Mapping[str, Tensor]
Places = tuple[tuple[int, Piece], ...]


def in_memory(params: Any) -> Tensors:
    """Arrays by name: tensors of a checkpoint, or parameters of `Model.params`.

    Args:
        params: a mapping of names to numpy or JAX arrays; the same nested, whose names are joined by dots; an
            nnx.State or nnx.Module; or an iterator of (name, array), which is read to its end. What
            `trainer_weights` returns takes the place of arrays.

    Raises:
        InvalidArgument: it is none of these.
        ModelError: an array was deleted, or has another dtype than a checkpoint's tensors.
    """
    tensors: dict[str, Tensor] = {}
    for name, array in _named(params):
        leaf = array.leaf if isinstance(array, LeafTensor) else array
        if not isinstance(name, str) or not isinstance(leaf, np.ndarray | jax.Array):
            limit = "must map names of a checkpoint's tensors to numpy or JAX arrays"
            raise InvalidArgument("params", f"{name}: {type(array).__name__}", limit)
        if name in tensors:
            raise ModelError("is given twice", file=PLACE, tensor=name)
        if leaf.dtype not in READABLE.values():
            raise ModelError(
                f"dtype {leaf.dtype} is not supported; {', '.join(map(str, DTYPES.values()))} are",
                file=PLACE,
                tensor=name,
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ModelError("was deleted; was it donated to a jitted function?", file=PLACE, tensor=name)
        tensors[name] = Tensor(PLACE, array)
    return tensors


def _named(params: Any) -> Iterator[tuple[Any, Any]]:
    """Names and arrays of whatever `in_memory` takes."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    if isinstance(params, Mapping):
        yield from _joined(params, "")
    elif isinstance(params, Iterator):
        for pair in params:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidArgument(
                    "params", type(pair).__name__, "an iterator must give pairs of a name and an array"
                )
            yield pair
    else:
        raise InvalidArgument(
            "params", type(params).__name__, "must map names of a checkpoint's tensors to arrays"
        )


def _joined(tree: Mapping[Any, Any], before: str) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items():
        name = f"{before}{key}" if isinstance(key, str | int) and (before or isinstance(key, str)) else key
        if isinstance(value, Mapping) and value and isinstance(name, str):
            yield from _joined(value, f"{name}.")
        else:
            yield name, value


def assemble_on_devices(
    target: jax.ShapeDtypeStruct, source: Sequence[Piece], arrays: Mapping[str, jax.Array]
) -> jax.Array:
    """Assembles a parameter in new memory of the target's devices. Each of them holds the whole of its
    tensors meanwhile.

    Args:
        arrays: by name, on any devices. Those of other devices are copied.
    """
    names, places = places_of(source)
    everywhere = NamedSharding(target.sharding.mesh, PartitionSpec())
    tensors = jax.device_put([arrays[name] for name in names], everywhere)
    assemble = _assembler(target.sharding)
    assembled: jax.Array = jax.block_until_ready(
        assemble(tensors, shape=target.shape, dtype=str(target.dtype), places=places)
    )
    return assembled


def places_of(source: Sequence[Piece]) -> tuple[list[str], Places]:
    """The names of a parameter's tensors, and its pieces with the place of their tensor among these, which
    are equal for identical layers.
    """
    names = [*dict.fromkeys(piece.name for piece in source)]
    return names, tuple((names.index(piece.name), piece._replace(name="")) for piece in source)


@cache
def _assembler(sharding: NamedSharding) -> Any:
    # a program per shape and places
    return jax.jit(assembled, static_argnames=("shape", "dtype", "places"), out_shardings=sharding)


def assembled(tensors: list[jax.Array], *, shape: tuple[int, ...], dtype: str, places: Places) -> jax.Array:
    out = jnp.zeros(shape, dtype)
    for at, piece in places:
        array = jnp.atleast_1d(tensors[at])
        array = array.swapaxes(-1, -2) if piece.transposed and array.ndim > 1 else array
        rows = array[piece.rows][..., piece.columns]
        out = out.at[piece.part].set(rows.reshape(out[piece.part].shape).astype(dtype))
    return out
