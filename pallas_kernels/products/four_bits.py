"""Four-bit weights with a scale for each group of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels.products import xla
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.support import why_sizes_unsupported
from pallas_kernels.products.weight import QuantizedWeight
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.hadamard import transform
from pallas_kernels.quantization.int4 import (
    GROUPS,
    Int4,
    groups,
    pack,
    pack_on_host,
    quantize_int4,
    wide,
    words,
)
from pallas_kernels.quantization.quantized import dequantize, quantize
from pallas_kernels.targets import (
    AMPERE_OR_NEWER,
    HOPPER,
    Implementation,
    Table,
    cores,
    why_no_dtype,
    why_none,
)

LEAST_GROUP = 16  # inputs with a common scale, for Ampere's kernel
FORM = "group", "dtype", "kind", "hadamard", "inputs"  # of an Int4, whatever its arrays


def _why_not(x: Any, weight: FourBits, *, grouped: bool, least: int) -> str | None:
    if (why := why_no_dtype(x)) is not None:
        return why
    if weight.divided_into != 1:
        return f"parts={weight.divided_into}: the kernel takes inputs in one part"
    if weight.numbers.group < least:
        return f"group={weight.numbers.group}: at least {least}"
    return why_sizes_unsupported(weight.shape, grouped=grouped, inputs=1)


def _hopper_dense(x: Rows, weight: FourBits, dtype: jnp.dtype[Any], device: jax.Device) -> jax.Array:
    from pallas_kernels.products.hopper import int4_product as kernel

    rows = weight.transformed(array_of(x))
    return kernel.int4_product(rows, weight.numbers, dtype=dtype, cores=cores(device))


def _hopper_grouped(x: jax.Array, weight: FourBits, groups: Groups) -> jax.Array:
    from pallas_kernels.products.hopper import int4_product as kernel

    return kernel.grouped_int4_product(weight.transformed(x), weight.matrices, groups)


def _ampere_dense(x: Rows, weight: FourBits, dtype: jnp.dtype[Any], device: jax.Device) -> jax.Array:
    from pallas_kernels.products import ampere

    matrix = ampere.matrices_of(weight.numbers[None])
    return ampere.product(weight.transformed(array_of(x)), matrix, dtype=dtype, cores=cores(device))


def _ampere_grouped(x: jax.Array, weight: FourBits, groups: Groups) -> jax.Array:
    from pallas_kernels.products import ampere

    return ampere.grouped_product(weight.transformed(x), ampere.matrices_of(weight.matrices), groups)


def _table(grouped: bool, hopper: Any, ampere: Any) -> Table:
    kernels = (HOPPER, GROUPS[0], hopper), (AMPERE_OR_NEWER, LEAST_GROUP, ampere)
    return tuple(
        Implementation(target, partial(_why_not, grouped=grouped, least=least), run)
        for target, least, run in kernels
    )


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("forms",))
@dataclass(frozen=True)
class FourBits(QuantizedWeight[Int4]):
    """Four-bit numbers [*out, in]."""

    DENSE = _table(False, _hopper_dense, _ampere_dense)
    GROUPED = _table(True, _hopper_grouped, _ampere_grouped)
    bits: ClassVar[int] = 4

    @classmethod
    def abstract(cls, plain: jax.ShapeDtypeStruct, form: WeightFormat, *, parts: int, hadamard: int) -> Int4:
        size = plain.shape[-1] // parts

        def each(numbers: int, dtype: Any) -> Any:
            return jax.ShapeDtypeStruct((*plain.shape[:-1], parts * numbers), dtype)

        scale = each(groups(size, form.group), jnp.float32)
        return Int4(
            values=each(words(size), jnp.int32),
            scale=scale,
            offset=scale if form.offset else None,
            size=size,
            group=form.group,
            dtype=str(plain.dtype),
            kind=form.numbers,
            hadamard=hadamard,
            inputs=form.inputs is not None,
        )

    @property
    def format(self) -> WeightFormat:
        numbers = self.numbers
        inputs = "int8" if numbers.inputs else None
        return WeightFormat(numbers.kind, self.bits, numbers.group, numbers.offset is not None, inputs)

    @property
    def matrices(self) -> Int4:
        """Numbers of each group's matrix [groups, out, in]."""
        return self.numbers.map(lambda array: array.reshape(array.shape[0], -1, array.shape[-1]))

    def flat(self) -> FourBits:
        return replace(self, numbers=self.numbers.map(lambda array: array.reshape(-1, array.shape[-1])))

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        if self.numbers.inputs:
            rows = quantize(transform(x, self.numbers.hadamard), "int8")
            y = xla.multiply(rows.values.astype(jnp.float32), wide(self.numbers), jnp.dtype(jnp.float32))
            return (y * rows.scale[:, None]).astype(dtype)
        return xla.multiply(self.transformed(x), wide(self.numbers).astype(x.dtype), dtype)

    @property
    def has_cpu_kernel(self) -> bool:
        return True

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        from pallas_kernels.products.cpu import products

        form = products.supported(form, str(x.dtype), self.format, *self.shape)
        return products.product_of_int4(x, self.numbers, dtype, form)

    def prepare(self) -> None:
        from pallas_kernels.products.cpu import products

        products.prepare_int4(self.dtype, self.numbers, self.format)

    def grouped_by_xla(self, x: jax.Array, groups: Groups) -> jax.Array:
        inputs = self.numbers.inputs
        matrices = wide(self.numbers) if inputs else self.dequantized()
        rows = self.transformed(x) if inputs else x
        return xla.grouped_product(rows, matrices.reshape(self.shape[0], -1, self.shape[-1]), None, groups)

    def fit(self, array: jax.Array) -> Int4:
        shardings = jax.tree.map(lambda x: x.sharding, self.numbers)
        options: Any = {"group": self.numbers.group, "parts": self.divided_into}
        options |= {name: getattr(self.numbers, name) for name in ("hadamard", "inputs")}
        to_int4 = jax.jit(quantize_int4, static_argnames=(*options,), out_shardings=shardings)
        packed: Int4 = jax.block_until_ready(to_int4(array, **options))
        return packed

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        words = math.prod(self.numbers.values.shape)
        rows = jax.ShapeDtypeStruct((1, self.shape[-1]), x)
        if why_none(self.table(grouped=grouped), device, rows, self) is None:
            return 0 if grouped else words
        return 64 * words  # a word holds eight four-bit numbers, which are first expanded to int32

    @property
    def parts(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        sharding, shape = self.numbers.values.sharding, self.shape
        by_group = (*shape[:-1], shape[-1] // self.numbers.group)
        return (
            jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding),
            jax.ShapeDtypeStruct(by_group, jnp.float32, sharding=sharding),
        )

    def joined(
        self,
        numbers: np.ndarray,
        scale: np.ndarray,
        offset: np.ndarray | None,
        place: Callable[[np.ndarray, Any], jax.Array],
    ) -> Int4:
        target, sharding = self.numbers, cast(NamedSharding, self.numbers.values.sharding)
        options: dict[str, Any] = {name: getattr(target, name) for name in FORM}
        options["parts"] = self.divided_into
        # compiling a program for each shape would take longer
        if sharding.mesh.devices.flat[0].platform == "cpu":
            packed: Int4 = jax.tree.map(place, pack_on_host(numbers, scale, offset, **options), target)
            return packed
        number, by_group = self.parts
        placed = (
            place(numbers, number),
            place(scale, by_group),
            None if offset is None else place(offset, by_group),
        )
        shardings = jax.tree.map(lambda x: x.sharding, target)
        to_int4 = jax.jit(pack, static_argnames=(*options,), out_shardings=shardings)  # a program per shape
        packed = jax.block_until_ready(to_int4(*placed, **options))
        return packed

    @property
    def divided_into(self) -> int:
        """Parts into which devices divide the inputs."""
        return self.shape[-1] // self.numbers.size

    def transformed(self, x: jax.Array) -> jax.Array:
        """What a kernel for floats multiplies: transformed and, with `inputs`, rounded as bytes would be."""
        spread = transform(x, self.numbers.hadamard)
        return (dequantize(quantize(spread, "int8")) if self.numbers.inputs else spread).astype(x.dtype)
