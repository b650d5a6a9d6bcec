"""Weights that are stored as they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.llvm.kinds import WEIGHTS
from pallas_kernels.products import xla
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.support import GRID, SIZE_GRID, why_sizes_unsupported
from pallas_kernels.products.weight import StoredWeight
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.targets import AMPERE, BLACKWELL, HOPPER, Implementation, why_no_dtype


def _why_not(x: Any, weight: Plain, *, inputs: int, outs: int = GRID) -> str | None:
    if (why := why_no_dtype(x)) is not None:
        return why
    if weight.dtype != x.dtype:
        return f"weight={weight.dtype}: the kernel takes x's dtype, {x.dtype}, or a quantized weight"
    return why_sizes_unsupported(weight.shape, grouped=True, inputs=inputs, outs=outs)


def _grouped(x: jax.Array, weight: Plain, groups: Groups, *, kernel: str) -> jax.Array:
    module = import_module(f"pallas_kernels.products.{kernel}")
    y: jax.Array = module.grouped_product(x, weight.matrices, None, groups)
    return y


def _ampere(x: jax.Array, weight: Plain, groups: Groups) -> jax.Array:
    from pallas_kernels.products.ampere import Matrices, grouped_product

    return grouped_product(x, Matrices(weight.matrices, str(weight.dtype)), groups)


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("forms",))
@dataclass(frozen=True)
class Plain(StoredWeight[jax.Array]):
    """An array [*out, in]. cuBLAS multiplies by a dense one on GPUs."""

    GROUPED = (
        Implementation(
            BLACKWELL,
            partial(_why_not, inputs=SIZE_GRID, outs=SIZE_GRID),
            partial(_grouped, kernel="blackwell"),
        ),
        Implementation(
            HOPPER, partial(_why_not, inputs=GRID), partial(_grouped, kernel="hopper.grouped_product")
        ),
        Implementation(AMPERE, partial(_why_not, inputs=SIZE_GRID), _ampere),
    )

    @classmethod
    def abstract(cls, plain: Any, form: WeightFormat, *, parts: int, hadamard: int) -> Any:
        return plain

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(str(self.dtype), 8 * self.dtype.itemsize)

    def flat(self) -> Plain:
        return replace(self, numbers=self.numbers.reshape(-1, self.shape[-1]))

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        return xla.multiply(x, self.numbers, dtype)

    @property
    def has_cpu_kernel(self) -> bool:
        return self.format.numbers in WEIGHTS

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        from pallas_kernels.products.cpu import products

        return products.in_form(form, x, self.numbers, None, dtype, self.format)

    def prepare(self) -> None:
        from pallas_kernels.products.cpu import products

        products.prepare(str(self.dtype), self.format)

    @property
    def matrices(self) -> jax.Array:
        """[groups, *out, in] -> [groups, outs, in]."""
        return self.numbers.reshape(self.shape[0], -1, self.shape[-1])

    def grouped_by_xla(self, x: jax.Array, groups: Groups) -> jax.Array:
        return xla.grouped_product(x, self.matrices, None, groups)

    def dequantized(self) -> jax.Array:
        return self.numbers

    def fit(self, array: jax.Array) -> jax.Array:
        return array

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        return 0
