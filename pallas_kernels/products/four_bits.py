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

from pallas_kernels import targets
from pallas_kernels.products import xla
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.support import why_no_kernel, why_sizes_unsupported
from pallas_kernels.products.weight import Axes, Forms, product_by_form
from pallas_kernels.products.xla import multiply
from pallas_kernels.quantization.hadamard import transform
from pallas_kernels.quantization.int4 import Int4, pack, pack_on_host, quantize_int4, wide
from pallas_kernels.quantization.quantized import dequantize, quantize
from pallas_kernels.targets import Impl, kernel_serves

FORM = "group", "dtype", "kind", "hadamard", "inputs"  # of an Int4, whatever its arrays


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("forms",))
@dataclass(frozen=True)
class FourBits:
    """Four-bit numbers [*out, in]; see `products.QuantizedWeight`."""

    numbers: Int4
    forms: Forms = ()
    eager: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def dtype(self) -> str:
        return self.numbers.dtype

    @property
    def format(self) -> str:
        return "w4a8" if self.numbers.inputs else "int4"

    @property
    def plain(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.numbers.values.sharding)

    def with_forms(self, forms: Forms) -> FourBits:
        return replace(self, forms=forms)

    def flat(self) -> FourBits:
        return self._map(lambda array: array.reshape(-1, array.shape[-1]))

    def __getitem__(self, index: Any) -> FourBits:
        return self._map(lambda array: array[index])

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> FourBits:
        return self[expert]

    def take(self, rows: jax.Array) -> jax.Array:
        return self._map(lambda array: jnp.take(array, rows, axis=0, mode="clip")).dequantized()

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        return product_by_form(x, self.flat(), dtype)

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        if self.numbers.inputs:
            rows = quantize(transform(x, self.numbers.hadamard), "int8")
            y = multiply(rows.values.astype(jnp.float32), wide(self.numbers), jnp.dtype(jnp.float32))
            return (y * rows.scale[:, None]).astype(dtype)
        return multiply(self._transformed(x), wide(self.numbers).astype(x.dtype), dtype)

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        from pallas_kernels.products.cpu import products

        refused = products.why_no_panels(str(x.dtype), self.format, *self.shape)
        by_panels = form == "panels" and refused is None
        return products.product_of_int4(x, self.numbers, dtype, by_panels=by_panels)

    def on_gpu(
        self, x: Rows, dtype: jnp.dtype[Any], *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        serves = kernel_serves(impl, self.why_unsupported(x, grouped=False, device=device))
        x = array_of(x)
        if not serves:
            return self.by_xla(x, dtype)
        from pallas_kernels.products.hopper import int4_product as kernel

        cores = targets.cores(device or jax.devices()[0])
        return kernel.int4_product(self._transformed(x), self.numbers, dtype=dtype, cores=cores)

    def grouped_product(
        self, x: jax.Array, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        if kernel_serves(impl, self.why_unsupported(x, grouped=True, device=device)):
            from pallas_kernels.products.hopper import int4_product as kernel

            packed = self.numbers.map(lambda array: array.reshape(array.shape[0], -1, array.shape[-1]))
            y = kernel.grouped_int4_product(self._transformed(x), packed, groups)
        else:
            inputs = self.numbers.inputs
            matrices = wide(self.numbers) if inputs else self.dequantized()
            rows = self._transformed(x) if inputs else x
            y = xla.grouped_product(rows, matrices.reshape(self.shape[0], -1, self.shape[-1]), None, groups)
        return y.reshape(len(x), *self.shape[1:-1])

    def why_unsupported(self, x: Any, *, grouped: bool, device: jax.Device | None = None) -> str | None:
        if (why := why_no_kernel(x, device)) is not None:
            return why
        if self._parts != 1:
            return f"parts={self._parts}: the kernel takes inputs in one part"
        return why_sizes_unsupported(self.shape, grouped=grouped, inputs=False)

    def prepare(self, x: str | None = None) -> None:
        from pallas_kernels.products.cpu import products

        products.prepare_int4(x or self.dtype, self.numbers)

    def dequantized(self) -> jax.Array:
        return self.numbers.dequantized()

    def axes(self, names: Axes) -> Any:
        return self.numbers.map(lambda array: names)

    def fit(self, array: jax.Array) -> Int4:
        shardings = jax.tree.map(lambda x: x.sharding, self.numbers)
        how: Any = {"group": self.group, "parts": self._parts}
        how |= {name: getattr(self.numbers, name) for name in ("hadamard", "inputs")}
        to_int4 = jax.jit(quantize_int4, static_argnames=(*how,), out_shardings=shardings)
        packed: Int4 = jax.block_until_ready(to_int4(array, **how))
        return packed

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        words = math.prod(self.numbers.values.shape)
        rows = jax.ShapeDtypeStruct((1, self.shape[-1]), x)
        if self.why_unsupported(rows, grouped=grouped, device=device) is None:
            return 0 if grouped else words
        return 64 * words  # a word holds eight four-bit numbers, which are first expanded to int32

    @property
    def group(self) -> int:
        return self.numbers.group

    @property
    def has_offset(self) -> bool:
        return self.numbers.offset is not None

    @property
    def parts(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        sharding, shape = self.numbers.values.sharding, self.shape
        by_group = (*shape[:-1], shape[-1] // self.group)
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
        how: dict[str, Any] = {name: getattr(target, name) for name in FORM}
        how["parts"] = self._parts
        # compiling a program for each shape would take longer
        if sharding.mesh.devices.flat[0].platform == "cpu":
            packed: Int4 = jax.tree.map(place, pack_on_host(numbers, scale, offset, **how), target)
            return packed
        number, by_group = self.parts
        placed = (
            place(numbers, number),
            place(scale, by_group),
            None if offset is None else place(offset, by_group),
        )
        shardings = jax.tree.map(lambda x: x.sharding, target)
        to_int4 = jax.jit(pack, static_argnames=(*how,), out_shardings=shardings)  # a program per shape
        packed = jax.block_until_ready(to_int4(*placed, **how))
        return packed

    @property
    def _parts(self) -> int:
        """Parts into which devices divide the inputs."""
        return self.shape[-1] // self.numbers.size

    def _map(self, function: Callable[[Any], Any]) -> FourBits:
        return replace(self, numbers=self.numbers.map(function))

    def _transformed(self, x: jax.Array) -> jax.Array:
        """What a kernel for floats multiplies: transformed and, with `inputs`, rounded as bytes would be."""
        spread = transform(x, self.numbers.hadamard)
        return (dequantize(quantize(spread, "int8")) if self.numbers.inputs else spread).astype(x.dtype)
