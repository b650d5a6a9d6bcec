"""Weights in memory in place of a checkpoint's files, and parameters assembled on the devices from JAX
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.safetensors import DTYPES, READABLE
from jengine.checkpoints.stored import Tensor
from jengine.models.pieces import Piece

PLACE = Path("params")  # in errors, the place of the file
Tensors = Mapping[str, Tensor]


def in_memory(params: Mapping[str, Any]) -> Tensors:
    """Tensors by name, as they are read from files.

    Args:
        params: numpy or JAX arrays by the names of a checkpoint's tensors.

    Raises:
        InvalidArgument: it is not such a mapping.
        ModelError: an array was deleted, or has another dtype than a checkpoint's tensors.
    """
    if not isinstance(params, Mapping):
        raise InvalidArgument(
            "params", type(params).__name__, "must map names of a checkpoint's tensors to arrays"
        )
    for name, array in params.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray | jax.Array):
            limit = "must map names of a checkpoint's tensors to numpy or JAX arrays"
            raise InvalidArgument("params", f"{name}: {type(array).__name__}", limit)
        if array.dtype not in READABLE.values():
            raise ModelError(
                f"dtype {array.dtype} is not supported; {', '.join(map(str, DTYPES.values()))} are",
                file=PLACE,
                tensor=name,
            )
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ModelError("was deleted; was it donated to a jitted function?", file=PLACE, tensor=name)
    return {name: Tensor(PLACE, array) for name, array in params.items()}


def assemble_on_devices(
    target: jax.ShapeDtypeStruct, source: Sequence[Piece], arrays: Mapping[str, jax.Array]
) -> jax.Array:
    """Assembles a parameter in new memory of the target's devices. Each of them holds the whole of its
    tensors meanwhile.

    Args:
        arrays: by name, on any devices. Those of other devices are copied.
    """
    names = [*dict.fromkeys(piece.name for piece in source)]
    everywhere = NamedSharding(target.sharding.mesh, PartitionSpec())
    tensors = jax.device_put([arrays[name] for name in names], everywhere)
    places = tuple((names.index(piece.name), piece._replace(name="")) for piece in source)
    assemble = _assembler(target.sharding)
    assembled: jax.Array = jax.block_until_ready(
        assemble(tensors, shape=target.shape, dtype=str(target.dtype), places=places)
    )
    return assembled


@cache
def _assembler(sharding: NamedSharding) -> Any:
    # a program per shape and places
    return jax.jit(_assembled, static_argnames=("shape", "dtype", "places"), out_shardings=sharding)


def _assembled(
    tensors: list[jax.Array], *, shape: tuple[int, ...], dtype: str, places: tuple[tuple[int, Piece], ...]
) -> jax.Array:
    out = jnp.zeros(shape, dtype)
    for at, piece in places:
        array = tensors[at].swapaxes(-1, -2) if piece.transposed and tensors[at].ndim > 1 else tensors[at]
        rows = array[piece.rows][..., piece.columns]
        out = out.at[piece.part].set(rows.reshape(out[piece.part].shape).astype(dtype))
    return out
