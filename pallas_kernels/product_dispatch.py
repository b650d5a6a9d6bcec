"""Chooses the implementation of products on GPUs, by device, dtype and shape; see `dispatch`. `products.product` is for any device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning, xla
from pallas_kernels.groups import Groups, one_group
from pallas_kernels.hadamard import transform
from pallas_kernels.int4 import Int4
from pallas_kernels.product_xla import Weight, by_xla
from pallas_kernels.quantized import Quantized, dequantize, quantize
from pallas_kernels.support import DTYPES, HOPPER, Impl, capability, kernel_serves

GRID = 64  # the numbers of outputs and inputs are multiples of this
EIGHT_BIT_ROWS = 512  # maximum rows of a dense product; for more, converting the weight once and using cuBLAS is faster


def why_grouped_product_unsupported(x: jax.Array, weight: Weight, *, device: jax.Device | None = None) -> str | None:
    """Why no kernel for `grouped_product` supports these arrays, or None."""
    return _why_product_unsupported(x, weight, 1, device)


def grouped_product(x: jax.Array, weight: Weight, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None) -> jax.Array:
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
    values: jax.Array = dequantize(weight) if isinstance(weight, Int4) else weight  # type: ignore[assignment]
    scale = None
    if isinstance(weight, Quantized):
        values, scale = weight.values, weight.scale.reshape(weight.shape[0], -1)
        if weight.inputs:  # rounds x as a product of eight-bit numbers would
            x = dequantize(quantize(transform(x, weight.hadamard), weight.kind)).astype(x.dtype)
    form: Any = xla.grouped_product
    if serves:
        from pallas_kernels import grouped_product as kernel

        form = kernel.grouped_product
    y = form(x, values.reshape(values.shape[0], -1, values.shape[-1]), scale, groups)
    return y.reshape(len(x), *weight.shape[1:-1])


def why_quantized_product_unsupported(x: jax.Array, weight: Quantized | Int4, *, device: jax.Device | None = None) -> str | None:
    """Why no kernel for `quantized_product` supports these arrays, or None."""
    if isinstance(weight, Quantized):
        if weight.inputs:
            return "inputs=True: XLA multiplies eight-bit numbers"
        if x.shape[0] > EIGHT_BIT_ROWS:
            return f"rows={x.shape[0]}: the kernel for eight-bit weights takes at most {EIGHT_BIT_ROWS}"
    return _why_product_unsupported(x, weight, 0, device)


def quantized_product(
    x: jax.Array,
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
    if not kernel_serves(impl, why_quantized_product_unsupported(x, weight, device=device), device):
        return by_xla(x, weight, jnp.dtype(dtype or x.dtype))
    if isinstance(weight, Int4):
        from pallas_kernels import int4_product as of_four_bits

        cores = tuning.cores(device or jax.devices()[0])
        return of_four_bits.int4_product(_transformed(x, weight), weight, dtype=dtype, cores=cores)
    from pallas_kernels import grouped_product as of_eight_bits

    rows = len(x)
    groups, block = one_group(rows)
    x = jnp.pad(_transformed(x, weight), ((0, -rows % block), (0, 0)))
    y = of_eight_bits.grouped_product(x, weight.values[None], weight.scale[None], groups, block=block, dtype=dtype)
    return y[:rows]


def _transformed(x: jax.Array, weight: Quantized | Int4) -> jax.Array:
    """x with the transform of the weight's inputs."""
    return transform(x, weight.hadamard).astype(x.dtype)


def _why_product_unsupported(x: jax.Array, weight: Weight, leading: int, device: jax.Device | None) -> str | None:
    """Why no kernel supports these rows and a weight [*leading, *out, in], or None. `leading` is a number of axes."""
    if capability(device) not in HOPPER:
        return f"device={(device or jax.devices()[0]).device_kind}: the kernel is for GPUs of compute capability {', '.join(HOPPER)}"
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
