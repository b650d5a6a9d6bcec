"""A matrix times one vector, or a few, at the speed at which a CPU reads the matrix."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray

from pallas_kernels.cpu.blocks import OUTS, ROWS, STEP, available, make_block
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

AHEAD = 2 * OUTS  # outputs
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
    return _in_parts(name, x if whole else x.astype(jnp.float32), weight, 1, dtype)


def matrix_few(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight.T, sums in float32; of what `serves_few` says.

    Args:
        x: [rows, in], weight's dtype.
        weight: bfloat16 or float32 [out, in].

    Returns:
        float32 [rows, out].
    """
    name = prepare_few(weight.dtype)
    assert name is not None, f"{weight.dtype}: see serves_few"
    return _in_parts(name, x, weight, OUTS, jnp.float32)


def _in_parts(name: str, x: jax.Array, weight: jax.Array, unit: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """[rows, out] of calls that give some outputs each, a multiple of `unit`."""
    rows, units = x.shape[0], weight.shape[0] // unit
    count = min(parts(), units)
    starts = [units * part // count * unit for part in range(count + 1)]
    pieces = [
        call(name, jax.ShapeDtypeStruct((rows, end - start), dtype), x, weight, jnp.array([start], jnp.int32))
        for start, end in pairwise(starts)
    ]
    return jnp.concatenate(pieces, axis=1)


def serves_few(rows: int, size: int, outs: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether `matrix_few` takes rows of this size and dtype, on this processor."""
    name = str(jnp.dtype(dtype))
    return available(name) and rows % ROWS == 0 and outs % OUTS == 0 and size % STEP[name] == 0


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
        size, start, _, outs = _shape(frame)
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


def prepare_few(dtype: jax.typing.DTypeLike) -> str | None:
    """Register what `matrix_few` calls for this dtype, if this processor has it; its name."""
    name = str(jnp.dtype(dtype))
    return register(f"jengine_matrix_few_{name}", partial(_few_handler, name)) if available(name) else None


def _few_handler(dtype: str) -> Any:
    fetching, at_hand = make_block(dtype, AHEAD), make_block(dtype, 0)
    stored, itemsize, source = BITS[dtype], np.dtype(BITS[dtype]).itemsize, SOURCE

    @handler
    def matrix_few_of(frame: int) -> int:
        if asked_for_version(frame, source):
            return 0
        size, start, rows, outs = _shape(frame)
        x = carray(pointer(argument(frame, 0)[0]), rows * size, stored)
        weight = carray(pointer(argument(frame, 1)[0] + start * size * itemsize), outs * size, stored)
        out = carray(pointer(result(frame, 0)[0]), rows * outs, np.float32)
        for o in range(0, outs, OUTS):
            fetching(x, 0, weight, o * size, out, o, outs, size)
            for row in range(ROWS, rows, ROWS):
                at_hand(x, row * size, weight, o * size, out, row * outs + o, outs, size)
        return 0

    return matrix_few_of


def _whole_handler() -> Any:
    source = SOURCE

    @handler
    def matrix_vector_of_int8(frame: int) -> int:
        if asked_for_version(frame, source):
            return 0
        size, start, _, outs = _shape(frame)
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
    """Inputs; the first output of this part; rows; outputs of this part."""
    start = carray(pointer(argument(frame, 2)[0]), 1, np.int32)[0]
    rows, outs = words(result(frame, 0)[1], 2)
    return words(argument(frame, 1)[1], 2)[1], np.int64(start), rows, outs
