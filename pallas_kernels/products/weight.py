"""Products of activations and weights that are stored output-major, [*out, in], in any format.

`Weight` is what models multiply by, and `StoredWeight` what the formats of parameters add to it: one class
for each, in `plain.py`, `eight_bits.py` and `four_bits.py`. `weights.py` finds the class of a parameter.

On a CPU there are several forms of a product. The fastest depends on the processor, the dtypes and the number
of rows. A weight knows the forms to use; the default is the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import devices
from pallas_kernels.devices import traced_for, traced_for_cpu
from pallas_kernels.llvm.kinds import INPUTS, WEIGHTS
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.targets import Impl

ROW_CLASSES = 1, 16, 64  # products have the same form up to each number of rows, and beyond the last

# pairs of a `form_key` and "kernel" (the default), "panels", "amx" or "xla"
Forms = tuple[tuple[str, str], ...]
Axes = tuple[str | None, ...]  # a name per axis


@runtime_checkable
class Weight(Protocol):
    """A matrix of products [*out, in], several of them [groups, *out, in], or a table of vectors [n, size].

    Weights are JAX pytrees, so programs can take them as arguments and pass them to control flow.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """[*out, in], however the numbers are stored."""

    @property
    def eager(self) -> bool:
        """Whether products read the numbers in x, and of an expert, all rows at once. So they cannot be
        traced.
        """

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Multiplies x [rows, in] by the matrix -> [rows, outs], in x's dtype or the given one.

        Sums are float32, or int32 for int8 numbers. A norm of x is computed as x is quantized, where a kernel
        can do both.
        """

    def grouped_product(
        self, x: jax.Array, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        """Multiplies each row of x by the matrix of its group; see `products.dispatch.grouped_product`."""

    def take(self, rows: jax.Array) -> jax.Array:
        """Rows int32[N] of a table [n, size] -> [N, size]. Rows out of bounds give the last row."""

    def __getitem__(self, index: Any) -> Weight:
        """The weight at an index of leading axes."""

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Weight:
        """An expert's matrix, for rows of these tokens of the step, int32 [rows]."""


class StoredWeight(Weight, Protocol):
    """A weight in the format of a parameter. Its arrays may be abstract where nothing is computed.

    Attributes:
        forms: of products on a CPU.
    """

    @property
    def forms(self) -> Forms: ...

    @property
    def dtype(self) -> Any:
        """dtype of the represented numbers."""

    @property
    def format(self) -> str:
        """The dtype of a plain weight or of eight-bit numbers; or "w8a8" or "fp8 inputs", if rows of x are
        quantized too; "by group"; "int4"; "w4a8", if rows of x are quantized to int8."""

    @property
    def plain(self) -> jax.ShapeDtypeStruct:
        """The represented array: its shape, dtype and sharding."""

    def with_forms(self, forms: Forms) -> Self:
        """The same weight with other forms of products."""

    def flat(self) -> Self:
        """[*out, in] -> [outs, in]. On a CPU, products read two axes in place, but would copy three."""

    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        """`product` by a flat weight, by XLA, for any device."""

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        """`product` by a flat weight, by a CPU's kernel. "amx" and "panels" are "kernel" for sizes that they
        do not support.
        """

    def on_gpu(
        self, x: Rows, dtype: jnp.dtype[Any], *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        """`product` by a flat weight, on a GPU. See `dispatch` for `impl` and `device`.

        Raises:
            ValueError: impl is "mosaic" and no kernel supports the call, or impl is "llvm".
        """

    def why_unsupported(self, x: Any, *, grouped: bool, device: jax.Device | None = None) -> str | None:
        """Why no GPU's kernel supports a dense or a grouped product with rows x, or None."""

    def prepare(self, x: str | None = None) -> None:
        """Registers with XLA the CPU kernels for products with this weight; see `weights.prepare`."""

    def dequantized(self) -> jax.Array:
        """The represented array."""

    def axes(self, names: Axes) -> Any:
        """The names of the axes of each of the parameter's arrays, given those of the represented array."""

    def fit(self, array: jax.Array) -> Any:
        """Converts an array to a parameter of this format, with the shardings of the abstract arrays."""

    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        """Bytes of a product's temporaries: converted numbers, or a kernel's partial sums."""


class QuantizedWeight(StoredWeight, Protocol):
    """A weight whose numbers and scales a checkpoint may store."""

    @property
    def group(self) -> int | None:
        """Inputs per scale; None: a scale for each output."""

    @property
    def has_offset(self) -> bool:
        """Whether each group has an offset beside its scale."""

    @property
    def parts(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The arrays to read from a checkpoint: numbers and scales. Offsets have the same shape as scales."""

    def joined(
        self,
        numbers: np.ndarray,
        scale: np.ndarray,
        offset: np.ndarray | None,
        place: Callable[[np.ndarray, Any], jax.Array],
    ) -> Any:
        """Combines these arrays to a parameter.

        Args:
            place: puts an array on the devices of an abstract one.
        """


def form_key(rows: int, x: str, weight: str) -> str:
    """The key of a class of products that use the same form.

    Args:
        x: dtype.
        weight: see `StoredWeight.format`.
    """
    most = next((most for most in ROW_CLASSES if rows <= most), None)
    return f"{x} * {weight}, {'more rows' if most is None else f'{most} rows'}"


def forms_of(forms: Mapping[str, str]) -> Forms:
    """Forms by `form_key`, for weights."""
    return tuple(sorted(forms.items()))


def product_by_form(x: Rows, weight: StoredWeight, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """The product of x [rows, in] and a flat weight [out, in], in the form for the default device."""
    dtype = jnp.dtype(dtype or x.dtype)
    if not traced_for_cpu():
        return weight.on_gpu(x, dtype, device=traced_for())
    form, x = _form(x, weight), array_of(x)
    if form == "xla":
        return weight.by_xla(x, dtype)

    def kernel(x: jax.Array, weight: StoredWeight) -> jax.Array:
        return weight.by_cpu_kernel(x, dtype, form)

    def xla(x: jax.Array, weight: StoredWeight) -> jax.Array:
        return weight.by_xla(x, dtype)

    y: jax.Array = lax.platform_dependent(x, weight, cpu=kernel, default=xla)
    return y


def _form(x: Rows, weight: StoredWeight) -> str:
    if devices.cpu_refused() is not None:
        return "xla"
    kind = weight.format
    supported = str(x.dtype) in INPUTS and kind in (*WEIGHTS, "w8a8", "fp8 inputs", "int4", "w4a8")
    if not supported or min(x.shape[0], *weight.shape) == 0:
        return "xla"
    return dict(weight.forms).get(form_key(x.shape[0], str(x.dtype), kind), "kernel")
