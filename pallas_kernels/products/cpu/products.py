"""Products of activations and weights on a CPU, for any number of rows, each in one call: what `multiply.py`
writes, for XLA's programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.llvm import amx, native
from pallas_kernels.llvm.calls import call, functions, register
from pallas_kernels.llvm.formats import Processor, processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.products.cpu import panels, tiles
from pallas_kernels.products.cpu.hadamard import transform_module
from pallas_kernels.products.cpu.int4 import in_pairs, int4_module
from pallas_kernels.products.cpu.int4_bytes import int4_bytes_module
from pallas_kernels.products.cpu.int4_panels import int4_bytes_panels_module, int4_panels_module
from pallas_kernels.products.cpu.int4_row import int4_row_module
from pallas_kernels.products.cpu.multiply import bytes_module, product_module
from pallas_kernels.products.cpu.panels import panels_serve
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.int4 import TILE, Int4

STORED = {"bfloat16", "float32"}  # of results
BYTES = ("quantize", "quantize_parts")  # functions: each part of the rows, and how many there are
PANELS = ("multiply", "parts")


def in_form(
    form: str,
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array | None,
    dtype: jax.typing.DTypeLike,
    weight: WeightFormat,
    hadamard: int = 1,
) -> jax.Array:
    """The product by a weight [out, in] of this format. Numbers have a scale for each output, or none."""
    form = supported(form, str(x.dtype), weight, *values.shape)
    if form == "amx":
        return product_by_tiles(x, values, scale, dtype, hadamard)
    by_panels = form == "panels"
    x = x.astype(jnp.float32) if form == "float32" else x
    if weight.inputs is not None and scale is not None:
        return product_of_bytes(x, values, scale, dtype, hadamard, by_panels=by_panels)
    return _call(register_panels(), dtype, x, values) if by_panels else product(x, values, scale, dtype)


def supported(form: str, x: str, weight: WeightFormat, outs: int, size: int) -> str:
    """A form of products: "amx", "panels", "row" or "float32"; for sizes and formats that these do not
    support and without permission to use tiles, "kernel".
    """
    serves = {"row": by_row, "float32": by_float32}.get(form)
    if serves is not None:
        return form if serves(processor(native.host()), x, weight) else "kernel"
    if form == "amx":
        return form if amx.permitted() and tiles_serve(x, weight, outs) else "kernel"
    return form if form == "panels" and panels_serve(x, weight, outs, size) else "kernel"


def by_row(at: Processor, x: str, weight: WeightFormat) -> bool:
    """Whether the form "row", a kernel for a single row, serves; see `int4_row.py`."""
    return weight.bits == 4 and weight.inputs is None and x in INPUTS and not in_pairs(at, x)


def by_float32(at: Processor, x: str, weight: WeightFormat) -> bool:
    """Whether the form "float32", the kernel for x converted to it, serves: where pairs of bfloat16 are
    slower.
    """
    return x == "bfloat16" and at.pairs and not at.fast_pairs and weight.bits > 4 and weight.inputs is None


def product(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """x @ weight.T, sums in float32, times scale, if any.

    Args:
        x: bfloat16 or float32 [rows, in].
        weight: [out, in], one of WEIGHTS; of eight bits with a scale, float32 [out].
        dtype: of the result; bfloat16 and float32 cost no pass of their own.
    """
    x = _as_multiplied(x, processor(native.host()).pairs)
    name = register_product(str(x.dtype), str(weight.dtype))
    return _call(name, dtype, x, weight, *([] if scale is None else [scale]))


def product_of_bytes(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    dtype: jax.typing.DTypeLike,
    hadamard: int = 1,
    *,
    by_panels: bool = False,
) -> jax.Array:
    """x, transformed, then quantized row by row to int8 as `quantize` does, times int8 weights; exact sums,
    times both scales. by_panels: faster for many rows, see `panels_serve`.
    """
    name = register_bytes(str(x.dtype), hadamard, by_panels=by_panels)
    row_sums = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    scratch = [*_quantized(x), row_sums, *_transformed(x, hadamard)]
    return _call(name, dtype, x, weight, scale, scratch=scratch)


def product_by_tiles(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike, hadamard: int = 1
) -> jax.Array:
    """`product` of bfloat16, or with a scale `product_of_bytes`, by AMX; see `tiles_serve`."""
    name = register_tiles(str(x.dtype), scale is not None, hadamard)
    scratch = [_packed(x, str(weight.dtype))]
    if scale is None:
        return _call(name, dtype, x, weight, scratch=scratch)
    scratch += [*_quantized(x), *_transformed(x, hadamard)]
    return _call(name, dtype, x, weight, scale, scratch=scratch)


def product_of_int4(x: jax.Array, weight: Int4, dtype: jax.typing.DTypeLike, form: str) -> jax.Array:
    """x @ weight.T, sums in float32, in a form like `in_form`'s; weights [out, in] are unpacked in registers.

    With `Int4.inputs`, x is transformed and quantized row by row to int8 first, and sums within a group are
    exact; by tiles, x is only transformed, and weights are rounded to bfloat16.
    """
    offset = [] if weight.offset is None else [weight.offset]
    arrays = weight.values, weight.scale, *offset
    by_panels, by_tiles = form == "panels", form == "amx"
    if weight.inputs and not by_tiles:
        rows, size = x.shape
        arranged = [] if by_panels else [jax.ShapeDtypeStruct((rows, -(-size // TILE) * TILE), jnp.int8)]
        group_sums = jax.ShapeDtypeStruct((rows, weight.scale.shape[-1]), jnp.float32)
        scratch = [*_quantized(x), *arranged, group_sums, *_transformed(x, weight.hadamard)]
        name = register_int4_bytes(str(x.dtype), weight, by_panels=by_panels)
        return _call(name, dtype, x, *arrays, scratch=scratch)
    if weight.hadamard > 1:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), *_transformed(x, weight.hadamard)]
        x = call(register_transform(str(x.dtype), weight.hadamard), shapes, x)[0]
    kind = weight.group, bool(offset), weight.kind
    if by_tiles:
        return _call(register_int4_tiles(*kind), dtype, x, *arrays, scratch=[_packed(x, "bfloat16")])
    x = x if by_panels else _as_multiplied(x, in_pairs(processor(native.host()), "bfloat16"))
    by_row = form == "row" and len(x) == 1
    name = register_int4_panels(*kind) if by_panels else register_int4(str(x.dtype), *kind, by_row=by_row)
    return _call(name, dtype, x, *arrays)


def _as_multiplied(x: jax.Array, pairs: bool) -> jax.Array:
    """x in the dtype in which the kernel multiplies it. It converts a single row itself; of several rows, it
    would convert each for every four outputs.
    """
    return x if len(x) == 1 else x.astype(_dtypes(str(x.dtype), pairs)[-1])


def _dtypes(x: str, pairs: bool) -> list[str]:
    """The dtypes in which the kernel takes x: for a single row, and for several.

    Args:
        pairs: the kernel multiplies pairs of bfloat16.
    """
    return ["bfloat16", "float32"] if x == "bfloat16" and not pairs else [x]


def _call(
    name: str,
    dtype: jax.typing.DTypeLike,
    x: jax.Array,
    *arrays: jax.Array,
    scratch: Sequence[jax.ShapeDtypeStruct] = (),
) -> jax.Array:
    """The product of x [rows, in] by a weight, of which the first array is [out, ...].

    Args:
        scratch: more results of the function, which are not used.
    """
    stored = dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
    out = jax.ShapeDtypeStruct((x.shape[0], arrays[0].shape[0]), stored)
    y: jax.Array = call(name, [out, *scratch], x, *arrays)[0] if scratch else call(name, out, x, *arrays)
    return y.astype(dtype)


def _quantized(x: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Bytes and scales of rows."""
    return [jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)]


def _transformed(x: jax.Array, hadamard: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, jnp.float32)] if hadamard > 1 else []


def _packed(x: jax.Array, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((tiles.packed_bytes(len(x), x.shape[1], dtype),), jnp.uint8)


def tiles_serve(x: str, weight: WeightFormat, outs: int) -> bool:
    """Whether tiles multiply these: bfloat16 by bfloat16 or four bits, and bytes."""
    floats = x == "bfloat16" and (weight.numbers == x or weight.bits == 4)
    of_bytes = x in INPUTS and weight.bits == 8 and weight.inputs == "int8"
    return outs >= tiles.OUTS and (floats or of_bytes)


def _register(
    name: str, wanted: Sequence[str | tuple[str, str]], module: Callable[..., str], *args: Any
) -> str:
    """Registers functions of a module for this processor; wanted: see `calls.functions`."""
    return register(name, lambda: functions(name, lambda: module(native.host(), *args), *wanted))


def _w8a8(hadamard: int) -> str:
    return "w8a8" if hadamard == 1 else f"w8a8_{hadamard}"


def _int4(kind: str, group: int, offset: bool) -> str:
    return f"{kind}_{group}{'_offset' if offset else ''}"


def register_tiles(x: str, of_bytes: bool, hadamard: int = 1) -> str:
    name = f"jengine_tiles_{x}_{_w8a8(hadamard) if of_bytes else 'bfloat16'}"
    wanted: list[str | tuple[str, str]] = ["pack", "multiply"]
    if of_bytes:
        wanted = [BYTES, *wanted]
    return _register(name, wanted, tiles.tiles_module, x, of_bytes, hadamard)


def register_int4_tiles(group: int, offset: bool, kind: str) -> str:
    name = f"jengine_tiles_{_int4(kind, group, offset)}"
    return _register(name, ("pack", "multiply"), tiles.int4_tiles_module, group, offset, kind)


def register_product(x: str, weight: str) -> str:
    return _register(f"jengine_product_{x}_{weight}", ("multiply",), product_module, x, weight)


def register_panels() -> str:
    return _register("jengine_panels", (PANELS,), panels.pairs_module)


def register_bytes(x: str, hadamard: int = 1, *, by_panels: bool = False) -> str:
    form, multiply = ("panels", PANELS) if by_panels else ("product", "multiply")
    module = panels.bytes_module if by_panels else bytes_module
    return _register(f"jengine_{form}_{x}_{_w8a8(hadamard)}", (BYTES, multiply), module, x, hadamard)


def register_int4(x: str, group: int, offset: bool, kind: str, *, by_row: bool = False) -> str:
    form, module = ("row", int4_row_module) if by_row else ("product", int4_module)
    name = f"jengine_{form}_{x}_{_int4(kind, group, offset)}"
    return _register(name, ("multiply",), module, x, group, offset, kind)


def register_int4_panels(group: int, offset: bool, kind: str) -> str:
    name = f"jengine_panels_{_int4(kind, group, offset)}"
    return _register(name, (PANELS,), int4_panels_module, group, offset, kind)


def register_int4_bytes(x: str, weight: Int4, *, by_panels: bool = False) -> str:
    form, multiply = ("panels", PANELS) if by_panels else ("product", "multiply")
    module = int4_bytes_panels_module if by_panels else int4_bytes_module
    group, offset, hadamard = weight.group, weight.offset is not None, weight.hadamard
    name = f"jengine_{form}_{x}_{_int4('w4a8', group, offset)}_{hadamard}"
    return _register(name, (BYTES, multiply), module, x, group, offset, hadamard)


def register_transform(x: str, block: int) -> str:
    wanted = ("transform", "transform_parts")
    return _register(f"jengine_transform_{x}_{block}", (wanted,), transform_module, x, block)


def prepare_int4(x: str, parameter: Int4, weight: WeightFormat) -> None:
    """Compile the kernels for a weight in four bits; see `prepare`."""
    outs = math.prod(parameter.shape[:-1])  # as products see them, be they several axes
    by_panels = panels_serve(x, weight, outs, parameter.size)
    by_tiles = amx.permitted() and tiles_serve(x, weight, outs)
    at, kind = processor(native.host()), (parameter.group, weight.offset, parameter.kind)
    if by_tiles:
        register_int4_tiles(*kind)
    if x in INPUTS and parameter.hadamard > 1 and (by_tiles or not parameter.inputs):
        register_transform(x, parameter.hadamard)
    if parameter.inputs:
        if by_panels:
            register_int4_bytes(x, parameter, by_panels=True)
        if x in INPUTS:
            register_int4_bytes(x, parameter)
        return
    if by_panels:
        register_int4_panels(*kind)
    if x in INPUTS:
        for dtype in _dtypes(x, in_pairs(at, x)):
            register_int4(dtype, *kind)
    if by_row(at, x, weight):
        register_int4(x, *kind, by_row=True)


def prepare(x: str, weight: WeightFormat, hadamard: int = 1) -> None:
    """Registers what products of x by weights of this format call; nothing where they have no kernel.

    Args:
        hadamard: of the weight, if rows are quantized to int8.
    """
    of_bytes = weight.inputs == "int8"
    if amx.permitted() and tiles_serve(x, weight, tiles.OUTS):
        register_tiles(x, of_bytes, hadamard)
    if panels_serve(x, weight, panels.OUTS, panels.inputs_at_once(weight)):
        if of_bytes:
            register_bytes(x, hadamard, by_panels=True)
        else:
            register_panels()
    if x in INPUTS:
        if of_bytes:
            register_bytes(x, hadamard)
        else:
            at = processor(native.host())
            for dtype in _dtypes(x, at.pairs and not by_float32(at, x, weight)):
                register_product(dtype, weight.numbers)
