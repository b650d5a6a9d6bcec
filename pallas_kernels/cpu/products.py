"""A matrix times one vector, or a few, at the speed at which a CPU reads the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray

from pallas_kernels.cpu.blocks import OUTS, ROWS, STEP, available, make_block
from pallas_kernels.cpu.calls import (
    argument,
    call,
    compiled,
    inlined,
    pointer,
    register,
    result,
    share,
    wide,
    words,
)

AHEAD = 2 * OUTS  # outputs
FEW = 32  # rows up to which the kernel for a few is faster than XLA's product
BITS: dict[str, Any] = {"bfloat16": np.uint16, "float32": np.float32, "int8": np.int8, "float8_e4m3fn": np.uint8}


def kernel_of(x: jax.Array, weight: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Which function multiplies rows x [rows, in] by weight [out, in] on this processor, or None."""
    rows, (outs, size), dtype = x.shape[0], weight.shape, str(weight.dtype)
    if rows == 1:
        return matrix_vector if dtype in BITS else None
    fits = rows <= FEW and rows % ROWS == 0 and outs % OUTS == 0 and x.dtype == weight.dtype
    return matrix_few if fits and available(dtype) and size % STEP[dtype] == 0 else None


def matrix_vector(x: jax.Array, weight: jax.Array) -> jax.Array:
    """weight @ x, sums in float32; in int32 where x is int8.

    Args:
        x: a float or int8 [1, in].
        weight: bfloat16, float32, int8 or float8_e4m3fn [out, in]; int8 if x is.

    Returns:
        float32 or int32 [1, out].
    """
    whole = x.dtype == jnp.int8
    vector, sums = (x, jnp.int32) if whole else (x.astype(jnp.float32), jnp.float32)
    return _call(_register_vector(str(weight.dtype), whole), vector, weight, sums)


def matrix_few(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight.T, sums in float32; of what `kernel_of` says.

    Args:
        x: [rows, in], weight's dtype.
        weight: bfloat16 or float32 [out, in].

    Returns:
        float32 [rows, out].
    """
    return _call(_register_few(str(weight.dtype)), x, weight, jnp.float32)


def prepare(dtype: jax.typing.DTypeLike) -> None:
    """Register what products with weights of this dtype may call."""
    name = str(jnp.dtype(dtype))
    if name in BITS:
        _register_vector(name, False)
    if name == "int8":
        _register_vector(name, True)
    if available(name):
        _register_few(name)


def _call(name: str, x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    out: jax.Array = call(name, jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype), x, weight)
    return out


def _register_vector(dtype: str, whole: bool) -> str:
    """Of int8 vectors if whole."""
    return register(
        f"jengine_matrix_vector_{dtype}{'_whole' if whole else ''}", lambda: [_whole_part() if whole else _vector_part(BITS[dtype])]
    )


def _register_few(dtype: str) -> str:
    return register(f"jengine_matrix_few_{dtype}", lambda: [_few_part(dtype)])


def _vector_part(stored: Any) -> Any:
    @compiled
    def matrix_vector_of_floats(frame: int, part: int, parts: int) -> None:
        size, _, outs = _shape(frame)
        x = carray(pointer(argument(frame, 0)[0]), size, np.float32)
        weight = carray(pointer(argument(frame, 1)[0]), outs * size, stored)
        out = carray(pointer(result(frame, 0)[0]), outs, np.float32)
        first, end = share(outs, part, parts)
        for n in range(first, end):
            row = weight[n * size : (n + 1) * size]
            total = np.float32(0)
            for i in range(size):
                total += x[i] * wide(row[i])
            out[n] = total

    return matrix_vector_of_floats


def _few_part(dtype: str) -> Any:
    fetching, at_hand = make_block(dtype, AHEAD), make_block(dtype, 0)
    stored = BITS[dtype]

    @compiled
    def matrix_few_of(frame: int, part: int, parts: int) -> None:
        size, rows, outs = _shape(frame)
        x = carray(pointer(argument(frame, 0)[0]), rows * size, stored)
        weight = carray(pointer(argument(frame, 1)[0]), outs * size, stored)
        out = carray(pointer(result(frame, 0)[0]), rows * outs, np.float32)
        first, end = share(outs // OUTS, part, parts)
        for o in range(first * OUTS, end * OUTS, OUTS):
            fetching(x, 0, weight, o * size, out, o, outs, size)
            for row in range(ROWS, rows, ROWS):
                at_hand(x, row * size, weight, o * size, out, row * outs + o, outs, size)

    return matrix_few_of


def _whole_part() -> Any:
    @compiled
    def matrix_vector_of_int8(frame: int, part: int, parts: int) -> None:
        size, _, outs = _shape(frame)
        x = carray(pointer(argument(frame, 0)[0]), size, np.int8)
        weight = carray(pointer(argument(frame, 1)[0]), outs * size, np.int8)
        out = carray(pointer(result(frame, 0)[0]), outs, np.int32)
        first, end = share(outs, part, parts)
        for n in range(first, end):
            row = weight[n * size : (n + 1) * size]
            total = np.int32(0)
            for i in range(size):
                total += np.int32(np.int32(x[i]) * np.int32(row[i]))
            out[n] = total

    return matrix_vector_of_int8


@inlined
def _shape(frame: int) -> Any:
    """Inputs, rows, outputs."""
    rows, outs = words(result(frame, 0)[1], 2)
    return words(argument(frame, 1)[1], 2)[1], rows, outs
