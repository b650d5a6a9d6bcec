"""Chooses the implementation of products on GPUs, by device, dtype and shape; see `dispatch`.
`products.product` is for any device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning, xla
from pallas_kernels.groups import GRID as ROW_GRID
from pallas_kernels.groups import Groups, one_group
from pallas_kernels.hadamard import transform
from pallas_kernels.int4 import Int4
from pallas_kernels.product_xla import Weight, by_xla, of_eight_bits
from pallas_kernels.quantized import Quantized, dequantize, quantize
from pallas_kernels.rows import Gated, Normed, Rows, Sum, array_of
from pallas_kernels.support import DTYPES, HOPPER, Impl, capability, kernel_serves

GRID = 64  # the numbers of outputs and inputs are multiples of this
SIZE_GRID = 128  # the size of a quantized row is a multiple of this
# maximum rows of a dense product; for more, cuBLAS is faster, even if it has to convert the weight first
EIGHT_BIT_ROWS = 512


def why_grouped_product_unsupported(
    x: jax.Array, weight: Weight, *, device: jax.Device | None = None
) -> str | None:
    """Why no kernel for `grouped_product` supports these arrays, or None."""
    return _why_product_unsupported(x, weight, 1, device)


def grouped_product(
    x: jax.Array, weight: Weight, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: [places, in], rows in the order of `groups.grouped`.
        weight: [groups, *out, in].
        impl, device: see `dispatch`.

    Returns:
        [places, *out], in x's dtype; undefined in places without a row.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    serves = kernel_serves(impl, why_grouped_product_unsupported(x, weight, device=device), device)
    if isinstance(weight, Int4) and serves:
        from pallas_kernels import int4_product as of_four_bits

        matrices = weight.map(lambda array: array.reshape(array.shape[0], -1, array.shape[-1]))
        y: jax.Array = of_four_bits.grouped_int4_product(_transformed(x, weight), matrices, groups)
        return y.reshape(len(x), *weight.shape[1:-1])
    if isinstance(weight, Int4) or (isinstance(weight, Quantized) and weight.by_group and not serves):
        weight = dequantize(weight)
    values: Any = weight
    scale = None
    if isinstance(weight, Quantized):
        groups_of_inputs = weight.scale.shape[-1:] if weight.by_group else ()
        values, scale = weight.values, weight.scale.reshape(weight.shape[0], -1, *groups_of_inputs)
        if weight.inputs:  # rounds x as a product of eight-bit numbers would
            x = dequantize(quantize(transform(x, weight.hadamard), weight.kind)).astype(x.dtype)
    form: Any = xla.grouped_product
    if serves:
        from pallas_kernels import grouped_product as kernel

        form = kernel.grouped_product
    y = form(x, values.reshape(values.shape[0], -1, values.shape[-1]), scale, groups)
    return y.reshape(len(x), *weight.shape[1:-1])


def why_quantized_product_unsupported(
    x: Rows, weight: Quantized | Int4, *, device: jax.Device | None = None
) -> str | None:
    """Why no kernel for `quantized_product` supports these arrays, or None."""
    if isinstance(weight, Quantized) and x.shape[0] > EIGHT_BIT_ROWS:
        return f"rows={x.shape[0]}: the kernel for eight-bit weights takes at most {EIGHT_BIT_ROWS}"
    if (
        isinstance(weight, Quantized)
        and weight.inputs
        and (why := why_quantize_rows_unsupported(x, device=device)) is not None
    ):
        return why
    return _why_product_unsupported(x, weight, 0, device)


def why_quantize_rows_unsupported(x: Rows, *, device: jax.Device | None = None) -> str | None:
    """Why no kernel quantizes rows x [rows, size], or None."""
    if capability(device) not in HOPPER:
        return (
            f"device={(device or jax.devices()[0]).device_kind}: the kernel is for GPUs of compute capability"
            f" {', '.join(HOPPER)}"
        )
    if str(x.dtype) not in (*DTYPES, "float32"):
        return f"dtype={x.dtype}: the kernel takes {', '.join((*DTYPES, 'float32'))}"
    if x.shape[1] % SIZE_GRID:
        return f"size={x.shape[1]}: the kernel takes multiples of {SIZE_GRID}"
    return None


def quantize_rows(
    x: Rows, kind: str, *, places: int | None = None, impl: Impl = "auto", device: jax.Device | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of x [rows, size] on a GPU, as `quantized.quantize`; on Hopper together with what
    `rows` describes.

    Args:
        kind: int8 or float8_e4m3fn.
        places: number of rows of the result, of which the last are undefined; None: as x.
        impl, device: see `dispatch`.

    Returns:
        Numbers [places, size] and their scales, float32 [places].

    Raises:
        ValueError: impl is "mosaic" and the kernel does not support the rows, or impl is "llvm".
    """
    if not kernel_serves(impl, why_quantize_rows_unsupported(x, device=device), device):
        rows = quantize(array_of(x), kind)
        more = 0 if places is None else places - x.shape[0]
        return jnp.pad(rows.values, ((0, more), (0, 0))), jnp.pad(rows.scale, (0, more))
    from pallas_kernels import quantize_rows as kernel

    if isinstance(x, Gated) and x.activation in kernel.GATES and x.dtype == jnp.bfloat16:
        values, scale, _ = kernel.quantize_rows(
            x.gate_up.reshape(len(x.gate_up), -1), kind, gate=x.activation, places=places
        )
        return values, scale
    if not isinstance(x, Normed):
        values, scale, _ = kernel.quantize_rows(array_of(x), kind, places=places)
        return values, scale
    norm, whole = kernel.Norm(x.weight, x.eps, x.offset), x.x
    first, add = (
        whole.parts if isinstance(whole, Sum) and whole.parts is not None else (array_of(whole), None)
    )
    values, scale, total = kernel.quantize_rows(first, kind, add=add, norm=norm, places=places)
    if isinstance(whole, Sum) and total is not None:
        whole.computed(total)
    return values, scale


def quantized_product(
    x: Rows,
    weight: Quantized | Int4,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> jax.Array:
    """Multiplies x [rows, in] by a quantized weight [out, in] on a GPU; `products.product` is for any device.

    Args:
        dtype: dtype of the result; None: x's.
        impl, device: see `dispatch`.

    Returns:
        [rows, out].

    Raises:
        ValueError: impl is "mosaic" and no kernel supports the call, or impl is "llvm".
    """
    serves = kernel_serves(impl, why_quantized_product_unsupported(x, weight, device=device), device)
    dtype = jnp.dtype(dtype or x.dtype)
    if isinstance(weight, Quantized) and weight.inputs:
        rows: Rows = x if weight.hadamard == 1 else transform(array_of(x), weight.hadamard)
        if not serves:
            values, scale = quantize_rows(
                rows, weight.kind, impl="xla" if impl == "xla" else "auto", device=device
            )
            return of_eight_bits(values, scale, weight, dtype)
        groups, block = one_group(x.shape[0])
        places = -(-x.shape[0] // block) * block  # a block reads all of its scales
        values, scale = quantize_rows(rows, weight.kind, places=places, device=device)
        return _dense(values, weight, groups, block, dtype, x_scale=scale)[: x.shape[0]]
    x = array_of(x)
    if not serves:
        return by_xla(x, weight, dtype)
    if isinstance(weight, Int4):
        from pallas_kernels import int4_product as of_four_bits

        cores = tuning.cores(device or jax.devices()[0])
        return of_four_bits.int4_product(_transformed(x, weight), weight, dtype=dtype, cores=cores)
    groups, block = one_group(len(x))
    # a block reads zeros beyond these
    padded = jnp.pad(_transformed(x, weight), ((0, -len(x) % ROW_GRID), (0, 0)))
    return _dense(padded, weight, groups, block, dtype)[: len(x)]


def _dense(
    x: jax.Array,
    weight: Quantized,
    groups: Groups,
    block: int,
    dtype: jnp.dtype[Any],
    x_scale: jax.Array | None = None,
) -> jax.Array:
    """The kernel of experts, with a single one."""
    from pallas_kernels import grouped_product as kernel

    return kernel.grouped_product(
        x, weight.values[None], weight.scale[None], groups, block=block, dtype=dtype, x_scale=x_scale
    )


def _transformed(x: jax.Array, weight: Quantized | Int4) -> jax.Array:
    """x with the transform of the weight's inputs."""
    return transform(x, weight.hadamard).astype(x.dtype)


def _why_product_unsupported(x: Rows, weight: Weight, leading: int, device: jax.Device | None) -> str | None:
    """Why no kernel supports these rows and a weight [*leading, *out, in], or None. `leading` is a number of
    axes.
    """
    if capability(device) not in HOPPER:
        return (
            f"device={(device or jax.devices()[0]).device_kind}: the kernel is for GPUs of compute capability"
            f" {', '.join(HOPPER)}"
        )
    if str(x.dtype) not in DTYPES:
        return f"dtype={x.dtype}: the kernel takes {' and '.join(DTYPES)}"
    if not isinstance(weight, Quantized | Int4) and weight.dtype != x.dtype:
        return f"weight={weight.dtype}: the kernel takes x's dtype, {x.dtype}, or a quantized weight"
    sizes = {"out": math.prod(weight.shape[leading:-1])}
    if isinstance(weight, Int4):
        if (parts := weight.shape[-1] // weight.size) != 1:
            return f"parts={parts}: the kernel takes inputs in one part"
    else:
        sizes["in"] = weight.shape[-1]
    for name, size in sizes.items():
        if size % GRID:
            return f"{name}={size}: the kernel takes multiples of {GRID}"
    return None
