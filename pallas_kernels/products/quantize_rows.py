"""Chooses how rows of activations are quantized on a GPU. ROW_QUANTIZATION is the table, see `targets`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.products.rows import Gated, Normed, Rows, Sum, array_of
from pallas_kernels.products.support import why_no_hopper_rows
from pallas_kernels.quantization.quantized import quantize
from pallas_kernels.targets import HOPPER, Impl, Implementation, choose


def _hopper_rows(x: Rows, kind: str, places: int | None) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.products.hopper import quantize_rows as kernel

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


ROW_QUANTIZATION = (Implementation(HOPPER, why_no_hopper_rows, _hopper_rows),)


def quantize_rows(
    x: Rows, kind: str, *, places: int | None = None, impl: Impl = "auto", device: jax.Device | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of x [rows, size] on a GPU, as `quantized.quantize`; on Hopper in one kernel with
    what `rows` describes.

    Args:
        kind: int8 or float8_e4m3fn.
        places: number of rows of the result, of which the last are undefined; None: as x.
        impl, device: see `dispatch`.

    Returns:
        Numbers [places, size] and their scales, float32 [places].

    Raises:
        ValueError: impl is "mosaic" and the kernel does not support the rows, or impl is "llvm".
    """
    kernel = choose(ROW_QUANTIZATION, impl, device, x)
    if kernel is None:
        rows = quantize(array_of(x), kind)
        more = 0 if places is None else places - x.shape[0]
        return jnp.pad(rows.values, ((0, more), (0, 0))), jnp.pad(rows.scale, (0, more))
    quantized: tuple[jax.Array, jax.Array] = kernel.run(x, kind, places)
    return quantized
