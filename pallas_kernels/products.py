"""Products of activations and weights that are stored output-major, [out, in].

Weights are plain, eight-bit with a scale per output, or four-bit with a scale per group. On a CPU there are
several forms of a product. The fastest depends on the processor, the dtypes and the number of rows. `using`
sets the forms for programs traced within it; the default is the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import product_dispatch
from pallas_kernels.cpu.kinds import INPUTS, WEIGHTS
from pallas_kernels.devices import cpu_refused as cpu_refused
from pallas_kernels.devices import traced_for, traced_for_cpu
from pallas_kernels.int4 import Int4
from pallas_kernels.product_xla import Weight as Weight
from pallas_kernels.product_xla import by_xla
from pallas_kernels.quantized import Quantized, quantize
from pallas_kernels.rows import Rows, array_of

# products use the same form up to each number of rows; larger ones are a further class
ROW_CLASSES = 1, 16, 64

_forms: ContextVar[Mapping[str, str]] = ContextVar("forms", default={})  # noqa: B039  # never written


@contextmanager
def using(forms: Mapping[str, str]) -> Iterator[None]:
    """Traces products in these forms on a CPU, in this thread.

    Args:
        forms: maps `form_key` to "kernel", "amx" or "xla". "amx" uses the kernel if a weight is too small for
            AMX tiles. Missing keys mean the default.
    """
    token = _forms.set(forms)
    try:
        yield
    finally:
        _forms.reset(token)


def form_key(rows: int, x: str, weight: str) -> str:
    """The key of a class of products that use the same form.

    Args:
        x: dtype.
        weight: see `kind_of`.
    """
    most = next((most for most in ROW_CLASSES if rows <= most), None)
    return f"{x} * {weight}, {'more rows' if most is None else f'{most} rows'}"


def prepare(weight: Any, x: str | None = None) -> None:
    """Registers with XLA the CPU kernels for products with this weight.

    Args:
        weight: an array, a Quantized or an Int4, or any object with the same shape and dtypes.
        x: dtype of the other operand; None: the dtype of the weight, or the one that it represents.
    """
    if cpu_refused() is None:
        from pallas_kernels.cpu import products

        if isinstance(weight, Int4):
            products.prepare_int4(x or weight.dtype, weight)
        else:
            products.prepare(x or str(weight.dtype), kind_of(weight), getattr(weight, "hadamard", 1))


def product(x: Rows, weight: Weight, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Multiplies x [rows, in] by weight [out, in]. A norm of x is computed as x is quantized, where a kernel
    can do both.

    Returns:
        [rows, out] in x's dtype or the given one. Sums are float32, or int32 for int8 numbers.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    form = _form(x, weight)
    if form == "xla" and isinstance(weight, Quantized | Int4) and not traced_for_cpu():
        return product_dispatch.quantized_product(x, weight, dtype, device=traced_for())
    x, xla = array_of(x), partial(by_xla, dtype=dtype)
    if form == "xla":
        return xla(x, weight)
    y: jax.Array = lax.platform_dependent(
        x, weight, cpu=partial(_by_cpu_kernel, dtype=dtype, form=form), default=xla
    )
    return y


def _form(x: Rows, weight: Weight) -> str:
    """The form of a product on a CPU; "xla" on other devices."""
    if not traced_for_cpu() or cpu_refused() is not None:
        return "xla"
    kind = kind_of(weight)
    if (
        str(x.dtype) not in INPUTS
        or kind not in (*WEIGHTS, "w8a8", "fp8 inputs", "int4")
        or min(x.shape[0], *weight.shape) == 0
    ):
        return "xla"
    return _forms.get().get(form_key(x.shape[0], str(x.dtype), kind), "kernel")


def kind_of(weight: Any) -> str:
    """A weight's dtype or "int4"; "w8a8" or "fp8 inputs" if rows of x are quantized too; "by group"."""
    if isinstance(weight, Int4):
        return "int4"
    if not isinstance(weight, Quantized):
        return str(weight.dtype)
    if weight.by_group:
        return "by group"
    return weight.kind if not weight.inputs else "w8a8" if weight.kind == "int8" else "fp8 inputs"


def _by_cpu_kernel(x: jax.Array, weight: Weight, dtype: jnp.dtype[Any], form: str) -> jax.Array:
    from pallas_kernels.cpu import products

    if isinstance(weight, Int4):
        return products.product_of_int4(x, weight, dtype)
    if form == "amx" and products.why_no_tiles(str(x.dtype), kind_of(weight), weight.shape[0]) is None:
        if isinstance(weight, Quantized):
            return products.product_by_tiles(x, weight.values, weight.scale, dtype, weight.hadamard)
        return products.product_by_tiles(x, weight, None, dtype)
    if not isinstance(weight, Quantized):
        return products.product(x, weight, None, dtype)
    if not weight.inputs:
        return products.product(x, weight.values, weight.scale, dtype)
    if weight.kind == "int8":
        return products.product_of_bytes(x, weight.values, weight.scale, dtype, weight.hadamard)
    rows = quantize(x, weight.kind)
    y = products.product(rows.values.astype(x.dtype), weight.values, weight.scale, jnp.float32)
    return (y * rows.scale[:, None]).astype(dtype)
