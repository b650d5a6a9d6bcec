"""Eight-bit weights: a scale for each output or, in FP8 checkpoints with blocks, each group of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.products import xla
from pallas_kernels.products.groups import BLOCK, Groups, block_rows, one_group
from pallas_kernels.products.groups import GRID as ROW_GRID
from pallas_kernels.products.quantize_rows import hopper_rows, quantize_rows
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.support import (
    EIGHT_BIT_ROWS,
    SIZE_GRID,
    why_no_hopper_rows,
    why_sizes_unsupported,
)
from pallas_kernels.products.weight import Axes, QuantizedWeight
from pallas_kernels.quantization.formats import FP8, WeightFormat
from pallas_kernels.quantization.hadamard import transform
from pallas_kernels.quantization.quantized import GROUP, Quantized, dequantize, quantize
from pallas_kernels.targets import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    Impl,
    Implementation,
    capability,
    choose,
    cores,
    why_no_dtype,
    why_none,
)

WITHOUT_FP8 = replace(  # whose tensor cores do not multiply FP8
    AMPERE,
    devices="GPUs of compute capability 8.0 to 8.7",
    includes=lambda device: (8, 0) <= (capability(device) or (0, 0)) < (8, 9),
)


def _why_no_hopper_dense(x: Any, weight: EightBits) -> str | None:
    if x.shape[0] > EIGHT_BIT_ROWS and not weight.multiplies_groups:
        return f"rows={x.shape[0]}: the kernel for eight-bit weights takes at most {EIGHT_BIT_ROWS}"
    if weight.numbers.inputs and (why := why_no_hopper_rows(x)) is not None:
        return why
    return _why_no_product(x, weight, grouped=False)


def _why_no_blackwell(x: Any, weight: EightBits, *, grouped: bool = True) -> str | None:
    rows, sizes = x.shape[0], {"inputs": SIZE_GRID, "outs": SIZE_GRID}
    few = (block_rows(rows, weight.shape[0]) if grouped else rows) <= BLOCK[0]
    if few and not weight.multiplies_groups:
        return f"rows={rows}: up to {BLOCK[0]} of a matrix cost mma.sync as few instructions"
    return _why_no_product(x, weight, grouped=grouped, **sizes)


def _why_no_blackwell_dense(x: Any, weight: EightBits) -> str | None:
    refused = None if weight.multiplies_groups else _why_no_ampere_dense(x, weight)
    return refused or _why_no_blackwell(x, weight, grouped=False)


def _why_no_ampere_dense(x: Any, weight: EightBits, *, fp8_inputs: bool = False) -> str | None:
    numbers = weight.numbers
    if numbers.inputs and not numbers.by_group and not (fp8_inputs and numbers.kind == FP8):
        return f"inputs={numbers.kind}: XLA multiplies these without converting them"
    if x.shape[0] > EIGHT_BIT_ROWS:
        return f"rows={x.shape[0]}: the kernel for eight-bit weights takes at most {EIGHT_BIT_ROWS}"
    return _why_no_product(x, weight, grouped=False, inputs=SIZE_GRID)


def _why_no_product(x: Any, weight: EightBits, *, grouped: bool = True, **sizes: int) -> str | None:
    return why_no_dtype(x) or why_sizes_unsupported(weight.shape, grouped=grouped, **sizes)


def _dense(
    x: Rows, weight: EightBits, dtype: jnp.dtype[Any], device: jax.Device, *, kernel: str
) -> jax.Array:
    """By the kernel of experts in a module, with a single one."""
    module = import_module(f"pallas_kernels.products.{kernel}")
    numbers, size = weight.numbers, x.shape[0]
    inputs = weight.transformed(x) if numbers.inputs else array_of(x)
    groups, block = one_group(size, module.LEAST_ROWS)
    if numbers.inputs:
        places = -(-size // block) * block  # a block reads all of its scales
        rows, x_scale = quantize_rows(
            inputs, numbers.kind, places=places, by_group=numbers.by_group, device=device
        )
    else:
        rows, x_scale = transform(array_of(inputs), numbers.hadamard).astype(x.dtype), None
        rows = jnp.pad(rows, ((0, -size % ROW_GRID), (0, 0)))  # a block reads zeros beyond these
    splits = module.splits_of(len(groups.place), numbers.values, rows.dtype, cores(device))
    options: dict[str, Any] = {"block": block, "dtype": dtype, "x_scale": x_scale, "splits": splits}
    values, scale = numbers.values[None], numbers.scale[None]
    y: jax.Array = module.grouped_product(rows, values, scale, groups, **options)
    return y[:size]


def _grouped(
    x: jax.Array, weight: EightBits, groups: Groups, *, kernel: str, quantized: Callable[..., Any]
) -> jax.Array:
    """By the kernel in a module; quantized: quantizes rows, if both sides have eight bits."""
    module = import_module(f"pallas_kernels.products.{kernel}")
    options: dict[str, Any] = {}
    if weight.multiplies_groups:
        rows, options["x_scale"] = quantized(x, weight.numbers.kind, by_group=True)
    else:
        rows = weight.rounded(x)
    y: jax.Array = module.grouped_product(rows, *weight.matrices, groups, dtype=x.dtype, **options)
    return y


def _ampere_dense(x: Rows, weight: EightBits, dtype: jnp.dtype[Any], device: jax.Device) -> jax.Array:
    from pallas_kernels.products.ampere import product

    numbers, inputs = weight.numbers, array_of(weight.transformed(x))
    matrix = _ampere_matrices(numbers.values[None], numbers.scale[None], numbers)
    options: dict[str, Any] = {"cores": cores(device)}
    if numbers.inputs and not numbers.by_group:
        rows = quantize(inputs, numbers.kind)
        y = product(rows.values.astype(x.dtype), matrix, dtype=jnp.float32, **options)
        return (y * rows.scale[:, None]).astype(dtype)
    rows_of_x = weight.rounded(array_of(x)) if numbers.inputs else inputs.astype(x.dtype)
    return product(rows_of_x, matrix, dtype=dtype, **options)


def _ampere_grouped(x: jax.Array, weight: EightBits, groups: Groups) -> jax.Array:
    from pallas_kernels.products.ampere import grouped_product

    return grouped_product(weight.rounded(x), _ampere_matrices(*weight.matrices, weight.numbers), groups)


def _ampere_matrices(values: jax.Array, scale: jax.Array, numbers: Quantized) -> Any:
    from pallas_kernels.products.ampere import Matrices

    return Matrices(values, numbers.kind, scale, scaled=GROUP if numbers.by_group else 0)


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("forms",))
@dataclass(frozen=True)
class EightBits(QuantizedWeight[Quantized]):
    """Eight-bit numbers [*out, in]."""

    DENSE = (
        Implementation(BLACKWELL, _why_no_blackwell_dense, partial(_dense, kernel="blackwell")),
        Implementation(HOPPER, _why_no_hopper_dense, partial(_dense, kernel="hopper.grouped_product")),
        Implementation(AMPERE, _why_no_ampere_dense, _ampere_dense),
        Implementation(WITHOUT_FP8, partial(_why_no_ampere_dense, fp8_inputs=True), _ampere_dense),
    )
    GROUPED = (
        Implementation(
            BLACKWELL,
            _why_no_blackwell,
            partial(_grouped, kernel="blackwell", quantized=partial(quantize_rows, impl="xla")),
        ),
        Implementation(
            HOPPER, _why_no_product, partial(_grouped, kernel="hopper.grouped_product", quantized=hopper_rows)
        ),
        Implementation(AMPERE, partial(_why_no_product, inputs=SIZE_GRID), _ampere_grouped),
    )
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
        numbers = replace(numbers, values=values, scale=numbers.scale.reshape(-1, *by_group))
        return replace(self, numbers=numbers)

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        numbers = self.numbers
        if numbers.by_group:
            return xla.multiply(self.rounded(x), dequantize(numbers).astype(x.dtype), dtype)
        if numbers.inputs:
            rows = quantize(transform(x, numbers.hadamard), numbers.kind)
            return xla.of_eight_bits(rows.values, rows.scale, numbers, dtype)
        return (xla.multiply_converted(x, numbers.values) * numbers.scale).astype(dtype)

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

    def prepare(self) -> None:
        from pallas_kernels.products.cpu import products

        products.prepare(self.dtype, self.format, self.numbers.hadamard)

    def on_gpu(
        self, x: Rows, dtype: jnp.dtype[Any], *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        numbers = self.numbers
        if numbers.inputs and not numbers.by_group and choose(self.DENSE, impl, device, x, self) is None:
            rows: Impl = "xla" if impl == "xla" else "auto"
            values, scale = quantize_rows(self.transformed(x), numbers.kind, impl=rows, device=device)
            return xla.of_eight_bits(values, scale, numbers, dtype)
        return super().on_gpu(x, dtype, impl=impl, device=device)

    @property
    def multiplies_groups(self) -> bool:
        """Whether both sides have eight bits and a scale for each group of inputs."""
        return self.numbers.inputs and self.numbers.by_group

    def transformed(self, x: Rows) -> Rows:
        """Rows as they are quantized."""
        return x if self.numbers.hadamard == 1 else transform(array_of(x), self.numbers.hadamard)

    def rounded(self, x: jax.Array) -> jax.Array:
        """Rows, rounded as a product of eight-bit numbers would, in their dtype."""
        if not self.numbers.inputs:
            return x
        spread, by_group = transform(x, self.numbers.hadamard), self.numbers.by_group
        return dequantize(quantize(spread, self.numbers.kind, by_group=by_group)).astype(x.dtype)

    @property
    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """Numbers [groups, outs, in] and their scales [groups, outs] or, by group, [groups, outs, n]."""
        numbers, experts = self.numbers, self.shape[0]
        by_group = numbers.scale.shape[-1:] if numbers.by_group else ()
        scale = numbers.scale.reshape(experts, -1, *by_group)
        return numbers.values.reshape(experts, -1, self.shape[-1]), scale

    def grouped_by_xla(self, x: jax.Array, groups: Groups) -> jax.Array:
        if self.numbers.by_group:
            matrices = dequantize(self.numbers).reshape(self.shape[0], -1, self.shape[-1])
            return xla.grouped_product(self.rounded(x), matrices, None, groups)
        return xla.grouped_product(self.rounded(x), *self.matrices, groups)

    def axes(self, names: Axes) -> Any:
        scale: Any = names if self.numbers.by_group else names[:-1]
        values: Any = names
        return replace(self.numbers, values=values, scale=scale)

    def fit(self, array: jax.Array) -> Quantized:
        target = self.numbers
        shardings = jax.tree.map(lambda x: x.sharding, target)
        convert = jax.jit(quantize, static_argnames=("dtype", "inputs", "hadamard"), out_shardings=shardings)
        options: dict[str, Any] = {"dtype": target.kind, "inputs": target.inputs, "hadamard": target.hadamard}
        quantized: Quantized = jax.block_until_ready(convert(array, **options))
        return quantized

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        rows, size = jax.ShapeDtypeStruct((1, self.shape[-1]), x), math.prod(self.shape)
        if self.multiplies_groups and why_none(self.table(grouped=grouped), device, rows, self) is None:
            return 0 if grouped else size // 4  # partial sums, as `input_splits` limits them
        return 4 * size

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
