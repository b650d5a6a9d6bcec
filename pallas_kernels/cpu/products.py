"""A matrix times one vector, at the speed at which a CPU reads the matrix."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray

from pallas_kernels.cpu.calls import (
    SOURCE,
    argument,
    asked_for_version,
    call,
    handler,
    inlined,
    parts,
    pointer,
    register,
    result,
    wide,
    words,
)

BITS: dict[str, Any] = {"bfloat16": np.uint16, "float32": np.float32, "int8": np.int8, "float8_e4m3fn": np.uint8}


def matrix_vector(x: jax.Array, weight: jax.Array) -> jax.Array:
    """weight @ x, sums in float32; in int32 where x is int8.

    Args:
        x: a float or int8 [1, in].
        weight: bfloat16, float32, int8 or float8_e4m3fn [out, in]; int8 if x is.

    Returns:
        float32 or int32 [1, out].
    """
    whole = x.dtype == jnp.int8
    name, dtype = prepare(weight.dtype, whole=whole), jnp.int32 if whole else jnp.float32
    vector, outs = x if whole else x.astype(jnp.float32), weight.shape[0]
    count = min(parts(), outs)
    starts = [outs * part // count for part in range(count + 1)]
    pieces = [
        call(name, jax.ShapeDtypeStruct((end - start,), dtype), vector, weight, jnp.array([start], jnp.int32))
        for start, end in pairwise(starts)
    ]
    return jnp.concatenate(pieces)[None]


def prepare(dtype: jax.typing.DTypeLike, *, whole: bool) -> str:
    """Register what `matrix_vector` calls for weights of this dtype; its name.

    Args:
        whole: of int8 vectors.
    """
    stored = str(jnp.dtype(dtype))
    make = _whole_handler if whole else partial(_handler, BITS[stored])
    return register(f"jengine_matrix_vector_{stored}{'_whole' if whole else ''}", make)


def _handler(stored: Any) -> Any:
    itemsize, source = np.dtype(stored).itemsize, SOURCE

    @handler
    def matrix_vector_of_floats(frame: int) -> int:
        if asked_for_version(frame, source):
            return 0
        size, start, outs = _shape(frame)
        x = carray(pointer(argument(frame, 0)[0]), size, np.float32)
        weight = carray(pointer(argument(frame, 1)[0] + start * size * itemsize), outs * size, stored)
        out = carray(pointer(result(frame, 0)[0]), outs, np.float32)
        for n in range(outs):
            row = weight[n * size : (n + 1) * size]
            total = np.float32(0)
            for i in range(size):
                total += x[i] * wide(row[i])
            out[n] = total
        return 0

    return matrix_vector_of_floats


def _whole_handler() -> Any:
    source = SOURCE

    @handler
    def matrix_vector_of_int8(frame: int) -> int:
        if asked_for_version(frame, source):
            return 0
        size, start, outs = _shape(frame)
        x = carray(pointer(argument(frame, 0)[0]), size, np.int8)
        weight = carray(pointer(argument(frame, 1)[0] + start * size), outs * size, np.int8)
        out = carray(pointer(result(frame, 0)[0]), outs, np.int32)
        for n in range(outs):
            row = weight[n * size : (n + 1) * size]
            total = np.int32(0)
            for i in range(size):
                total += np.int32(np.int32(x[i]) * np.int32(row[i]))
            out[n] = total
        return 0

    return matrix_vector_of_int8


@inlined
def _shape(frame: int) -> Any:
    """Inputs; the first output of this part; outputs of this part."""
    return (
        words(argument(frame, 1)[1], 2)[1],
        np.int64(carray(pointer(argument(frame, 2)[0]), 1, np.int32)[0]),
        words(result(frame, 0)[1], 1)[0],
    )
