"""Weights that are stored as they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.products import xla
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.support import why_no_kernel, why_sizes_unsupported
from pallas_kernels.products.weight import Axes, Forms, product_by_form
from pallas_kernels.products.xla import multiply
from pallas_kernels.targets import Impl, kernel_serves


@partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("forms",))
@dataclass(frozen=True)
class Plain:
    """An array [*out, in]; see `products.StoredWeight`."""

    array: jax.Array
    forms: Forms = ()
    eager: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> jnp.dtype[Any]:
        return self.array.dtype

    @property
    def format(self) -> str:
        return str(self.array.dtype)

    @property
    def plain(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.array.sharding)

    def with_forms(self, forms: Forms) -> Plain:
        return replace(self, forms=forms)

    def flat(self) -> Plain:
        return replace(self, array=self.array.reshape(-1, self.shape[-1]))

    def __getitem__(self, index: Any) -> Plain:
        return replace(self, array=self.array[index])

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Plain:
        return self[expert]

    def take(self, rows: jax.Array) -> jax.Array:
        return jnp.take(self.array, rows, axis=0, mode="clip")

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        return product_by_form(x, self.flat(), dtype)

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        return multiply(x, self.array, dtype)

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        from pallas_kernels.products.cpu import products

        if form == "amx" and products.why_no_tiles(str(x.dtype), self.format, self.shape[0]) is None:
            return products.product_by_tiles(x, self.array, None, dtype)
        if form == "panels" and products.why_no_panels(str(x.dtype), self.format, *self.shape) is None:
            return products.product_by_panels(x, self.array, None, dtype)
        return products.product(x, self.array, None, dtype)

    def on_gpu(
        self, x: Rows, dtype: jnp.dtype[Any], *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        return self.by_xla(array_of(x), dtype)

    def grouped_product(
        self, x: jax.Array, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        form: Any = xla.grouped_product
        if kernel_serves(impl, self.why_unsupported(x, grouped=True, device=device)):
            from pallas_kernels.products.hopper import grouped_product as kernel

            form = kernel.grouped_product
        y: jax.Array = form(x, self.array.reshape(self.shape[0], -1, self.shape[-1]), None, groups)
        return y.reshape(len(x), *self.shape[1:-1])

    def why_unsupported(self, x: Any, *, grouped: bool, device: jax.Device | None = None) -> str | None:
        if (why := why_no_kernel(x, device)) is not None:
            return why
        if self.dtype != x.dtype:
            return f"weight={self.dtype}: the kernel takes x's dtype, {x.dtype}, or a quantized weight"
        return why_sizes_unsupported(self.shape, grouped=grouped)

    def prepare(self, x: str | None = None) -> None:
        from pallas_kernels.products.cpu import products

        products.prepare(x or self.format, self.format)

    def dequantized(self) -> jax.Array:
        return self.array

    def axes(self, names: Axes) -> Axes:
        return names

    def fit(self, array: jax.Array) -> jax.Array:
        return array

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        return 0
