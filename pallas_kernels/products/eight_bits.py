"""Eight-bit weights: a scale for each output or, in FP8 checkpoints with blocks, each group of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import targets
from pallas_kernels.products.groups import GRID as ROW_GRID
from pallas_kernels.products.groups import Groups, one_group
from pallas_kernels.products.quantize_rows import quantize_rows, why_quantize_rows_unsupported
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.support import EIGHT_BIT_ROWS, why_no_kernel, why_sizes_unsupported
from pallas_kernels.products.weight import Axes, QuantizedWeight, grouped_form
from pallas_kernels.products.xla import multiply, multiply_converted, of_eight_bits
from pallas_kernels.quantization.formats import FP8, WeightFormat
from pallas_kernels.quantization.hadamard import transform
from pallas_kernels.quantization.quantized import GROUP, Quantized, dequantize, quantize
from pallas_kernels.targets import Impl, kernel_serves


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("forms",))
@dataclass(frozen=True)
class EightBits(QuantizedWeight[Quantized]):
    """Eight-bit numbers [*out, in]."""

    bits: ClassVar[int] = 8

    @classmethod
    def abstract(
        cls, plain: jax.ShapeDtypeStruct, form: WeightFormat, *, parts: int, hadamard: int
    ) -> Quantized:
        by_group = (plain.shape[-1] // form.group,) if form.group else ()
        values: Any = jax.ShapeDtypeStruct(plain.shape, form.numbers)
        scale: Any = jax.ShapeDtypeStruct((*plain.shape[:-1], *by_group), jnp.float32)
        return Quantized(values, scale, str(plain.dtype), form.inputs is not None, form.numbers, hadamard)

    @property
    def format(self) -> WeightFormat:
        numbers = self.numbers
        group, inputs = GROUP if numbers.by_group else 0, numbers.kind if numbers.inputs else None
        return WeightFormat(numbers.kind, self.bits, group, inputs=inputs)

    def flat(self) -> EightBits:
        numbers, by_group = self.numbers, self.numbers.scale.shape[-1:] if self.numbers.by_group else ()
        values = numbers.values.reshape(-1, self.shape[-1])
        return self._with(replace(numbers, values=values, scale=numbers.scale.reshape(-1, *by_group)))

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        numbers = self.numbers
        if numbers.by_group:
            return multiply(x, dequantize(numbers).astype(x.dtype), dtype)
        if numbers.inputs:
            rows = quantize(transform(x, numbers.hadamard), numbers.kind)
            return of_eight_bits(rows.values, rows.scale, numbers, dtype)
        return (multiply_converted(x, numbers.values) * numbers.scale).astype(dtype)

    @property
    def has_cpu_kernel(self) -> bool:
        return not self.numbers.by_group

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        from pallas_kernels.products.cpu import products

        numbers = self.numbers
        if self.format.inputs == FP8:
            rows = quantize(x, FP8)
            y = products.product(rows.values.astype(x.dtype), numbers.values, numbers.scale, jnp.float32)
            return (y * rows.scale[:, None]).astype(dtype)
        return products.in_form(form, x, numbers.values, numbers.scale, dtype, self.format, numbers.hadamard)

    def prepare(self, x: str | None = None) -> None:
        if not self.has_cpu_kernel:
            return
        from pallas_kernels.products.cpu import products

        products.prepare(x or self.dtype, self.format, self.numbers.hadamard)

    def on_gpu(
        self, x: Rows, dtype: jnp.dtype[Any], *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        numbers = self.numbers
        serves = kernel_serves(impl, self.why_unsupported(x, grouped=False, device=device))
        if numbers.inputs:
            rows: Rows = x if numbers.hadamard == 1 else transform(array_of(x), numbers.hadamard)
            if not serves:
                how: Impl = "xla" if impl == "xla" else "auto"
                values, scale = quantize_rows(rows, numbers.kind, impl=how, device=device)
                return of_eight_bits(values, scale, numbers, dtype)
            groups, block = one_group(x.shape[0])
            places = -(-x.shape[0] // block) * block  # a block reads all of its scales
            values, scale = quantize_rows(rows, numbers.kind, places=places, device=device)
            y = self._of_one_group(values, groups, block, dtype, device, x_scale=scale)
            return y[: x.shape[0]]
        x = array_of(x)
        if not serves:
            return self.by_xla(x, dtype)
        groups, block = one_group(len(x))
        rows = transform(x, numbers.hadamard).astype(x.dtype)
        padded = jnp.pad(rows, ((0, -len(x) % ROW_GRID), (0, 0)))  # a block reads zeros beyond these
        return self._of_one_group(padded, groups, block, dtype, device)[: len(x)]

    def grouped(self, x: jax.Array, groups: Groups, *, by_kernel: bool) -> jax.Array:
        numbers, form, experts = self.numbers, grouped_form(by_kernel), self.shape[0]
        if numbers.by_group and not by_kernel:
            return form(x, dequantize(numbers).reshape(experts, -1, self.shape[-1]), None, groups)
        by_group = numbers.scale.shape[-1:] if numbers.by_group else ()
        scale = numbers.scale.reshape(experts, -1, *by_group)
        if numbers.inputs:  # rounds x as a product of eight-bit numbers would
            x = dequantize(quantize(transform(x, numbers.hadamard), numbers.kind)).astype(x.dtype)
        return form(x, numbers.values.reshape(experts, -1, self.shape[-1]), scale, groups)

    def why_unsupported(self, x: Any, *, grouped: bool, device: jax.Device | None = None) -> str | None:
        if not grouped:
            if x.shape[0] > EIGHT_BIT_ROWS:
                return f"rows={x.shape[0]}: the kernel for eight-bit weights takes at most {EIGHT_BIT_ROWS}"
            if self.numbers.inputs and (why := why_quantize_rows_unsupported(x, device=device)) is not None:
                return why
        return why_no_kernel(x, device) or why_sizes_unsupported(self.shape, grouped=grouped)

    def axes(self, names: Axes) -> Any:
        scale: Any = names if self.numbers.by_group else names[:-1]
        values: Any = names
        return replace(self.numbers, values=values, scale=scale)

    def fit(self, array: jax.Array) -> Quantized:
        target = self.numbers
        shardings = jax.tree.map(lambda x: x.sharding, target)
        convert = jax.jit(quantize, static_argnames=("dtype", "inputs", "hadamard"), out_shardings=shardings)
        how: dict[str, Any] = {"dtype": target.kind, "inputs": target.inputs, "hadamard": target.hadamard}
        quantized: Quantized = jax.block_until_ready(convert(array, **how))
        return quantized

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        return 4 * math.prod(self.shape)

    @property
    def parts(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return self.numbers.values, self.numbers.scale  # type: ignore[return-value]

    def joined(
        self,
        numbers: np.ndarray,
        scale: np.ndarray,
        offset: np.ndarray | None,
        place: Callable[[np.ndarray, Any], jax.Array],
    ) -> Quantized:
        target = self.numbers
        return replace(target, values=place(numbers, target.values), scale=place(scale, target.scale))

    def _with(self, numbers: Quantized) -> EightBits:
        return replace(self, numbers=numbers)

    def _of_one_group(
        self,
        x: jax.Array,
        groups: Groups,
        block: int,
        dtype: jnp.dtype[Any],
        device: jax.Device | None,
        x_scale: jax.Array | None = None,
    ) -> jax.Array:
        """The kernel of experts, with a single one."""
        from pallas_kernels.products.hopper import grouped_product as kernel

        values, scale = self.numbers.values, self.numbers.scale[None]
        cores = targets.cores(device or jax.devices()[0])
        splits = kernel.splits_of(len(groups.place), values, x.dtype, cores)
        return kernel.grouped_product(
            x, values[None], scale, groups, block=block, dtype=dtype, x_scale=x_scale, splits=splits
        )
