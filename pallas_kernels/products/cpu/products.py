"""Products of activations and weights on a CPU, for any number of rows, each in one call: what `multiply.py`
writes, for XLA's programs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.llvm import native
from pallas_kernels.llvm.calls import call, register
from pallas_kernels.llvm.kinds import INPUTS, WEIGHTS
from pallas_kernels.products.cpu import panels, tiles
from pallas_kernels.products.cpu.hadamard import transform_module
from pallas_kernels.products.cpu.int4 import int4_module
from pallas_kernels.products.cpu.int4_bytes import int4_bytes_module
from pallas_kernels.products.cpu.int4_panels import int4_bytes_panels_module, int4_panels_module
from pallas_kernels.products.cpu.multiply import bytes_module, product_module
from pallas_kernels.products.cpu.panels import why_no_panels as why_no_panels
from pallas_kernels.quantization.int4 import TILE, Int4

STORED = {"bfloat16", "float32"}  # of results


def product(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """x @ weight.T, sums in float32, times scale, if any.

    Args:
        x: bfloat16 or float32 [rows, in].
        weight: [out, in], one of WEIGHTS; of eight bits with a scale, float32 [out].
        dtype: of the result; bfloat16 and float32 cost no pass of their own.
    """
    out = jax.ShapeDtypeStruct(
        (x.shape[0], weight.shape[0]), dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
    )
    y: jax.Array = call(
        register_product(str(x.dtype), str(weight.dtype)), out, x, weight, *([] if scale is None else [scale])
    )
    return y.astype(dtype)


def product_by_panels(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike, hadamard: int = 1
) -> jax.Array:
    """As `product` of bfloat16 by bfloat16, or with a scale as `product_of_bytes`, faster for many rows; of
    what `why_no_panels` refuses nothing.
    """
    if scale is not None:
        return _of_bytes(register_panels_of_bytes(str(x.dtype), hadamard), x, weight, scale, dtype, hadamard)
    out = jax.ShapeDtypeStruct(
        (x.shape[0], weight.shape[0]), dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
    )
    y: jax.Array = call(register_panels(), out, x, weight)
    return y.astype(dtype)


def product_of_bytes(
    x: jax.Array, weight: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike, hadamard: int = 1
) -> jax.Array:
    """x, transformed, then quantized row by row to int8 as `quantize` does, times int8 weights; exact sums,
    times both scales.
    """
    return _of_bytes(register_bytes(str(x.dtype), hadamard), x, weight, scale, dtype, hadamard)


def _of_bytes(
    name: str,
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    dtype: jax.typing.DTypeLike,
    hadamard: int,
) -> jax.Array:
    rows, size = x.shape
    shapes = [
        jax.ShapeDtypeStruct(
            (rows, weight.shape[0]), dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
        ),
        jax.ShapeDtypeStruct((rows, size), jnp.int8),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        *_transformed(x, hadamard),
    ]
    y: jax.Array = call(name, shapes, x, weight, scale)[0]
    return y.astype(dtype)


def product_by_tiles(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, dtype: jax.typing.DTypeLike, hadamard: int = 1
) -> jax.Array:
    """As `product` of bfloat16 by bfloat16, or with a scale as `product_of_bytes`, by AMX; of what
    `why_no_tiles` refuses nothing.
    """
    rows, size = x.shape
    shapes = [
        jax.ShapeDtypeStruct(
            (rows, weight.shape[0]), dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
        ),
        jax.ShapeDtypeStruct((tiles.packed_bytes(rows, size, str(weight.dtype)),), jnp.uint8),
    ]
    if scale is not None:
        shapes += [
            jax.ShapeDtypeStruct((rows, size), jnp.int8),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            *_transformed(x, hadamard),
        ]
    name = register_tiles(str(x.dtype), scale is not None, hadamard)
    y: jax.Array = call(name, shapes, x, weight, *([] if scale is None else [scale]))[0]
    return y.astype(dtype)


def product_of_int4(
    x: jax.Array, weight: Int4, dtype: jax.typing.DTypeLike, *, by_panels: bool = False
) -> jax.Array:
    """x @ weight.T, sums in float32; weights [out, in] are unpacked in registers.

    With `Int4.inputs`, x is transformed and quantized row by row to int8 first, and sums within a group are
    exact.

    Args:
        by_panels: faster for many rows; of what `why_no_panels` refuses nothing.
    """
    if weight.inputs:
        return _product_of_int4_and_bytes(x, weight, dtype, by_panels)
    if weight.hadamard > 1:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape, jnp.float32)]
        x = call(register_transform(str(x.dtype), weight.hadamard), shapes, x)[0]
    out = jax.ShapeDtypeStruct(
        (x.shape[0], weight.shape[0]), dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
    )
    offset = [] if weight.offset is None else [weight.offset]
    form = weight.group, bool(offset), weight.kind
    name = register_int4_panels(*form) if by_panels else register_int4(str(x.dtype), *form)
    y: jax.Array = call(name, out, x, weight.values, weight.scale, *offset)
    return y.astype(dtype)


def _product_of_int4_and_bytes(
    x: jax.Array, weight: Int4, dtype: jax.typing.DTypeLike, by_panels: bool
) -> jax.Array:
    rows, size = x.shape
    arranged = [] if by_panels else [jax.ShapeDtypeStruct((rows, -(-size // TILE) * TILE), jnp.int8)]
    shapes = [
        jax.ShapeDtypeStruct(
            (rows, weight.shape[0]), dtype if str(jnp.dtype(dtype)) in STORED else jnp.float32
        ),
        jax.ShapeDtypeStruct((rows, size), jnp.int8),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        *arranged,
        jax.ShapeDtypeStruct((rows, weight.scale.shape[-1]), jnp.float32),
        *_transformed(x, weight.hadamard),
    ]
    offset = [] if weight.offset is None else [weight.offset]
    name = (register_int4_bytes_panels if by_panels else register_int4_bytes)(str(x.dtype), weight)
    y: jax.Array = call(name, shapes, x, weight.values, weight.scale, *offset)[0]
    return y.astype(dtype)


def why_no_tiles(x: str, kind: str, outs: int) -> str | None:
    """Why `product_by_tiles` cannot take these, or None."""
    if (x, kind) != ("bfloat16", "bfloat16") and (x not in INPUTS or kind != "w8a8"):
        return f"{x} by {kind}: tiles multiply bfloat16 by bfloat16, and bytes"
    return f"outputs={outs}: at least {tiles.OUTS}" if outs < tiles.OUTS else None


def _transformed(x: jax.Array, hadamard: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, jnp.float32)] if hadamard > 1 else []


def register_tiles(x: str, of_bytes: bool, hadamard: int = 1) -> str:
    name = f"jengine_tiles_{x}_{_w8a8(hadamard) if of_bytes else 'bfloat16'}"

    def text() -> str:
        return tiles.tiles_module(native.host(), x, of_bytes=of_bytes, hadamard=hadamard)

    def make() -> list[int | tuple[int, int]]:
        if not of_bytes:
            return [*native.compiled(text, "pack", "multiply", name=name)]
        quantize, parts, *others = native.compiled(
            text, "quantize", "quantize_parts", "pack", "multiply", name=name
        )
        return [(quantize, parts), *others]

    return register(name, make)


def _w8a8(hadamard: int) -> str:
    return "w8a8" if hadamard == 1 else f"w8a8_{hadamard}"


def register_product(x: str, weight: str) -> str:
    name = f"jengine_product_{x}_{weight}"
    return register(
        name, lambda: native.compiled(lambda: product_module(native.host(), x, weight), "multiply", name=name)
    )


def register_panels() -> str:
    name = "jengine_panels"

    def make() -> list[int | tuple[int, int]]:
        multiply, parts = native.compiled(
            lambda: panels.pairs_module(native.host()), "multiply", "parts", name=name
        )
        return [(multiply, parts)]

    return register(name, make)


def register_panels_of_bytes(x: str, hadamard: int = 1) -> str:
    name = f"jengine_panels_{x}_{_w8a8(hadamard)}"

    def make() -> list[int | tuple[int, int]]:
        quantize, quantize_parts, multiply, parts = native.compiled(
            lambda: panels.bytes_module(native.host(), x, hadamard),
            *("quantize", "quantize_parts", "multiply", "parts"),
            name=name,
        )
        return [(quantize, quantize_parts), (multiply, parts)]

    return register(name, make)


def register_bytes(x: str, hadamard: int = 1) -> str:
    name = f"jengine_product_{x}_{_w8a8(hadamard)}"

    def make() -> list[int | tuple[int, int]]:
        functions = "quantize", "quantize_parts", "multiply"
        quantize, parts, multiply = native.compiled(
            lambda: bytes_module(native.host(), x, hadamard), *functions, name=name
        )
        return [(quantize, parts), multiply]

    return register(name, make)


def register_int4(x: str, group: int, offset: bool, kind: str = "int4") -> str:
    name = f"jengine_product_{x}_{kind}_{group}{'_offset' if offset else ''}"
    return register(
        name,
        lambda: native.compiled(
            lambda: int4_module(native.host(), x, group, offset, kind), "multiply", name=name
        ),
    )


def register_int4_panels(group: int, offset: bool, kind: str = "int4") -> str:
    name = f"jengine_panels_{kind}_{group}{'_offset' if offset else ''}"

    def make() -> list[int | tuple[int, int]]:
        multiply, parts = native.compiled(
            lambda: int4_panels_module(native.host(), group, offset, kind), "multiply", "parts", name=name
        )
        return [(multiply, parts)]

    return register(name, make)


def register_int4_bytes_panels(x: str, weight: Int4) -> str:
    form = weight.group, weight.offset is not None, weight.hadamard
    name = f"jengine_panels_{x}_{_w4a8(*form)}"

    def make() -> list[int | tuple[int, int]]:
        quantize, quantize_parts, multiply, parts = native.compiled(
            lambda: int4_bytes_panels_module(native.host(), x, *form),
            *("quantize", "quantize_parts", "multiply", "parts"),
            name=name,
        )
        return [(quantize, quantize_parts), (multiply, parts)]

    return register(name, make)


def _w4a8(group: int, offset: bool, hadamard: int) -> str:
    return f"w4a8_{group}{'_offset' if offset else ''}_{hadamard}"


def register_int4_bytes(x: str, weight: Int4) -> str:
    form = weight.group, weight.offset is not None, weight.hadamard
    name = f"jengine_product_{x}_{_w4a8(*form)}"

    def make() -> list[int | tuple[int, int]]:
        functions = "quantize", "quantize_parts", "multiply"
        quantize, parts, multiply = native.compiled(
            lambda: int4_bytes_module(native.host(), x, *form), *functions, name=name
        )
        return [(quantize, parts), multiply]

    return register(name, make)


def register_transform(x: str, block: int) -> str:
    name = f"jengine_transform_{x}_{block}"

    def make() -> list[int | tuple[int, int]]:
        transform, parts = native.compiled(
            lambda: transform_module(native.host(), x, block), "transform", "transform_parts", name=name
        )
        return [(transform, parts)]

    return register(name, make)


def prepare_int4(x: str, weight: Int4) -> None:
    """As `prepare`."""
    outs, size = weight.shape[-2], weight.size
    if why_no_panels(x, "w4a8" if weight.inputs else "int4", outs, size) is None:
        if weight.inputs:
            register_int4_bytes_panels(x, weight)
        else:
            register_int4_panels(weight.group, weight.offset is not None, weight.kind)
    if x in INPUTS and weight.inputs:
        register_int4_bytes(x, weight)
    elif x in INPUTS:
        register_int4(x, weight.group, weight.offset is not None, weight.kind)
        if weight.hadamard > 1:
            register_transform(x, weight.hadamard)


def prepare(x: str, weight: str, hadamard: int = 1) -> None:
    """Register what products of these dtypes call; nothing where they have no kernel.

    Args:
        weight: or "w8a8" or "fp8 inputs", where x is quantized too.
        hadamard: of a w8a8 weight.
    """
    if tiles.permitted() and why_no_tiles(x, weight, tiles.OUTS) is None:
        register_tiles(x, weight == "w8a8", hadamard)
    if why_no_panels(x, weight, panels.OUTS, panels.inputs_at_once(weight)) is None:
        if weight == "w8a8":
            register_panels_of_bytes(x, hadamard)
        else:
            register_panels()
    if x in INPUTS and weight == "w8a8":
        register_bytes(x, hadamard)
    elif x in INPUTS and weight in (*WEIGHTS, "fp8 inputs"):
        register_product(x, "float8_e4m3fn" if weight == "fp8 inputs" else weight)
