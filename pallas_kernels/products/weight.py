"""Products of activations and weights that are stored output-major, [*out, in], in any format.

`Weight` is what models multiply by, and `StoredWeight` the base of those that parameters are: one class for
each form in which numbers are stored, in `plain.py`, `eight_bits.py` and `four_bits.py`. `weights.py` finds
the class of a parameter or of a format.

On a CPU there are several forms of a product. The fastest depends on the processor, the dtypes and the number
of rows. A weight knows the forms to use; the default is the kernel.

On a GPU, a format has two tables of kernels, DENSE and GROUPED, see `targets`. Their calls are (x, weight).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import devices
from pallas_kernels.devices import traced_for, traced_for_cpu
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.quantized import dequantize
from pallas_kernels.targets import Impl, Table, choose

ROW_CLASSES = 1, 16, 64  # products have the same form up to each number of rows, and beyond the last

# pairs of a `form_key` and "kernel" (the default), "row", "float32", "panels", "amx" or "xla"
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
        """Multiplies each row of x by the matrix of its group -> [places, *out], in x's dtype; undefined in
        places without a row.

        Args:
            x: [places, in], rows in the order of `groups.grouped`.

        Raises:
            ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
        """

    def take(self, rows: jax.Array) -> jax.Array:
        """Rows int32[N] of a table [n, size] -> [N, size]. Rows out of bounds give the last row."""

    def __getitem__(self, index: Any) -> Weight:
        """The weight at an index of leading axes."""

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Weight:
        """An expert's matrix, for rows of these tokens of the step, int32 [rows]."""


@dataclass(frozen=True)
class StoredWeight[P](ABC):
    """A Weight in the format of a parameter. Its arrays may be abstract where nothing is computed.

    Attributes:
        DENSE: kernels for GPUs. They take x, which may be `Rows`, a flat weight, the result's dtype and the
            device.
        GROUPED: kernels for GPUs. They take x, the weight and groups, and return [places, outs].
        numbers: the parameter.
        forms: of products on a CPU.
    """

    DENSE: ClassVar[Table] = ()
    GROUPED: ClassVar[Table] = ()

    numbers: P
    forms: Forms = ()

    @classmethod
    @abstractmethod
    def abstract(cls, plain: jax.ShapeDtypeStruct, form: WeightFormat, *, parts: int, hadamard: int) -> P:
        """The abstract parameter; see `weights.abstract`."""

    @property
    @abstractmethod
    def format(self) -> WeightFormat: ...

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = cast(Any, self.numbers).shape
        return shape

    @property
    def dtype(self) -> Any:
        """dtype of the represented numbers."""
        return cast(Any, self.numbers).dtype

    @property
    def eager(self) -> bool:
        return False

    @property
    def plain(self) -> jax.ShapeDtypeStruct:
        """The represented array: its shape, dtype and sharding."""
        return jax.ShapeDtypeStruct(
            self.shape, self.dtype, sharding=jax.tree.leaves(self.numbers)[0].sharding
        )

    def with_forms(self, forms: Forms) -> Self:
        """This weight with other forms of products."""
        return replace(self, forms=forms)

    def __getitem__(self, index: Any) -> Self:
        return replace(self, numbers=cast(Any, self.numbers)[index])

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Self:
        return self[expert]

    def take(self, rows: jax.Array) -> jax.Array:
        taken = jax.tree.map(lambda array: jnp.take(array, rows, axis=0, mode="clip"), self.numbers)
        return replace(self, numbers=taken).dequantized()

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        weight = self.flat()
        dtype = jnp.dtype(dtype or x.dtype)
        if not traced_for_cpu():
            return weight.on_gpu(x, dtype, device=traced_for())
        form, x = weight._form(x), array_of(x)
        if form == "xla":
            return weight.by_xla(x, dtype)

        def kernel(x: jax.Array, weight: Self) -> jax.Array:
            return weight.by_cpu_kernel(x, dtype, form)

        def xla(x: jax.Array, weight: Self) -> jax.Array:
            return weight.by_xla(x, dtype)

        y: jax.Array = lax.platform_dependent(x, weight, cpu=kernel, default=xla)
        return y

    def _form(self, x: Rows) -> str:
        """The form of the product by a flat weight on a CPU."""
        supported = str(x.dtype) in INPUTS and self.has_cpu_kernel
        if devices.cpu_refused() is not None or not supported or min(x.shape[0], *self.shape) == 0:
            return "xla"
        return dict(self.forms).get(form_key(x.shape[0], str(x.dtype), self.format.name), "kernel")

    def grouped_product(
        self, x: jax.Array, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        kernel = choose(self.GROUPED, impl, device, x, self)
        y: jax.Array = self.grouped_by_xla(x, groups) if kernel is None else kernel.run(x, self, groups)
        return y.reshape(len(x), *self.shape[1:-1])

    @abstractmethod
    def grouped_by_xla(self, x: jax.Array, groups: Groups) -> jax.Array:
        """`grouped_product` -> [places, outs], by XLA."""

    @abstractmethod
    def flat(self) -> Self:
        """[*out, in] -> [outs, in]. On a CPU, products read two axes in place, but would copy three."""

    @abstractmethod
    def by_xla(self, x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
        """`product` by a flat weight, by XLA, for any device."""

    @property
    def has_cpu_kernel(self) -> bool:
        """Whether a CPU's kernel multiplies rows of `INPUTS` by weights of this format."""
        return False

    def by_cpu_kernel(self, x: jax.Array, dtype: jnp.dtype[Any], form: str) -> jax.Array:
        """`product` by a flat weight with `has_cpu_kernel`. Other forms are "kernel" where they do not
        serve; see `products.supported`.
        """
        raise NotImplementedError(f"{self.format.name}: a CPU has no kernel")

    def prepare(self) -> None:
        """Registers the kernels of a weight with `has_cpu_kernel`; see `weights.prepare`."""
        raise NotImplementedError(f"{self.format.name}: nothing registers the kernel")

    def on_gpu(
        self, x: Rows, dtype: jnp.dtype[Any], *, impl: Impl = "auto", device: jax.Device | None = None
    ) -> jax.Array:
        """`product` by a flat weight, on a GPU. See `dispatch` for `impl` and `device`.

        Raises:
            ValueError: impl is "mosaic" and no kernel supports the call, or impl is "llvm".
        """
        kernel = choose(self.DENSE, impl, device, x, self)
        if kernel is None:
            return self.by_xla(array_of(x), dtype)
        y: jax.Array = kernel.run(x, self, dtype, device or jax.devices()[0])
        return y

    def table(self, *, grouped: bool) -> Table:
        """The kernels for GPUs."""
        return self.GROUPED if grouped else self.DENSE

    @abstractmethod
    def dequantized(self) -> jax.Array:
        """The represented array."""

    def axes(self, names: Axes) -> Any:
        """The names of the axes of each of the parameter's arrays, given those of the represented array."""
        return jax.tree.map(lambda array: names, self.numbers)

    @abstractmethod
    def fit(self, array: jax.Array) -> P:
        """Converts an array to a parameter of this format, with the shardings of the abstract arrays."""

    @abstractmethod
    def converted_bytes(
        self, x: jax.typing.DTypeLike, *, grouped: bool, device: jax.Device | None = None
    ) -> int:
        """Bytes of a product's temporaries: converted numbers, or a kernel's partial sums."""


class QuantizedWeight[P](StoredWeight[P]):
    """A weight whose numbers and scales a checkpoint may store.

    Attributes:
        bits: of a number.
    """

    bits: ClassVar[int]

    @property
    @abstractmethod
    def parts(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The arrays to read from a checkpoint: numbers and scales. Offsets have the same shape as scales."""

    @abstractmethod
    def joined(
        self,
        numbers: np.ndarray,
        scale: np.ndarray,
        offset: np.ndarray | None,
        place: Callable[[np.ndarray, Any], jax.Array],
    ) -> P:
        """Combines these arrays to a parameter.

        Args:
            place: puts an array on the devices of an abstract one.
        """

    def dequantized(self) -> jax.Array:
        return dequantize(cast(Any, self.numbers))


def form_key(rows: int, x: str, weight: str) -> str:
    """The key of a class of products that use the same form.

    Args:
        x: dtype.
        weight: name of its format.
    """
    limit = next((limit for limit in ROW_CLASSES if rows <= limit), None)
    return f"{x} * {weight}, {'more rows' if limit is None else f'{limit} rows'}"


def forms_of(forms: Mapping[str, str]) -> Forms:
    """Forms by `form_key`, for weights."""
    return tuple(sorted(forms.items()))
