"""Weights in memory in place of a checkpoint's files, and parameters assembled on devices from JAX arrays.
They may be parameters already: a tree like `Model.params`, such as a trainer has that runs the model's own
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jengine.base.errors import InvalidArgument, ModelError
from jengine.checkpoints.layouts import LeafTensor, without_flax
from jengine.checkpoints.orbax import by_name
from jengine.checkpoints.safetensors import DTYPES, READABLE
from jengine.checkpoints.stored import Tensor
from jengine.models import Model, Params
from jengine.models.pieces import Piece, pieces_of
from pallas_kernels.products.weights import stored

PLACE = Path("params")  # in errors, the place of the file
# Constants in older checkpoints, perhaps in unsupported dtypes: frequencies, positions, and masks of GPT-2
# and GPT-NeoX.
CONSTANTS = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    ".embeddings.position_ids",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "t2d",  # the inverse of an EAGLE-3 head's d2t
)
Tensors = Mapping[str, Tensor]
Parameter = Any  # as programs take it: an array, or the numbers and scales of a quantized one
Target = Any  # its abstract form, with shardings
Places = tuple[tuple[int, Piece], ...]


def in_memory(params: Any) -> Tensors:
    """Arrays by name: tensors of a checkpoint, without constants, or parameters of `Model.params`.

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
        if isinstance(name, str) and name.endswith(CONSTANTS):
            continue
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
    params = without_flax(params)
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


def placed(array: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """An array on its devices; each takes its part."""
    made: jax.Array = jax.block_until_ready(
        jax.make_array_from_callback(target.shape, target.sharding, array.__getitem__)
    )
    return made


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
        rows = piece.of(jnp.atleast_1d(tensors[at]))
        out = out.at[piece.part].set(rows.reshape(out[piece.part].shape).astype(dtype))
    return out


def own_names(model: Model, tensors: Tensors) -> bool:
    """Whether names are those of parameters, such as layers.0.mlp.down, rather than of a checkpoint."""
    parameters, stored = by_name(model.params).keys(), {piece.name for piece in pieces_of(model.sources)}
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
        array, wanted = tensors[name].array, stored(target).plain
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
    array, wanted = tensor.array, stored(target).plain
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(wanted.sharding, array.ndim):
        return stored(target).fit(jax.device_put(array, wanted.sharding))
    # Between devices, JAX would compile slices of each shape. A copy: a CPU device may take over its memory.
    return stored(target).fit(placed(np.array(array), wanted))
