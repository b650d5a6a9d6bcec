"""Chooses how rows of activations are quantized on a GPU. ROW_QUANTIZATION is the table, see `targets`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.products.rows import Gated, Normed, Rows, Sum, array_of
from pallas_kernels.products.support import why_no_hopper_rows
from pallas_kernels.quantization.quantized import quantize
from pallas_kernels.targets import HOPPER, Impl, Implementation, choose


def hopper_rows(x: Rows, kind: str, **options: Any) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.products.hopper import quantize_rows as kernel

    whole: Any = None
    if isinstance(x, Gated) and x.activation in kernel.GATES and x.dtype == jnp.bfloat16:
        first, options["gate"] = x.gate_up.reshape(len(x.gate_up), -1), x.activation
    elif isinstance(x, Normed):
        whole, options["norm"] = x.x, kernel.Norm(x.weight, x.eps, x.offset)
        parts = whole.parts if isinstance(whole, Sum) else None
        first, options["add"] = (array_of(whole), None) if parts is None else parts
    else:
        first = array_of(x)
    values, scale, total = kernel.quantize_rows(first, kind, **options)
    if total is not None:
        whole.computed(total)
    return values, scale


ROW_QUANTIZATION = (Implementation(HOPPER, why_no_hopper_rows, hopper_rows),)


def quantize_rows(
    x: Rows,
    kind: str,
    *,
    places: int | None = None,
    by_group: bool = False,
    impl: Impl = "auto",
    device: jax.Device | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of x [rows, size] on a GPU, as `quantized.quantize`; on Hopper in one kernel with
    what `rows` describes.

    Args:
        kind: int8 or float8_e4m3fn.
        places: number of rows of the result, of which the last are undefined; None: as x.
        by_group: whether each 128 numbers of a row have a scale.
        impl, device: see `dispatch`.

    Returns:
        Numbers [places, size] and their scales, float32 [places] or, by group, [size / 128, places].

    Raises:
        ValueError: impl is "mosaic" and the kernel does not support the rows, or impl is "llvm".
    """
    kernel = choose(ROW_QUANTIZATION, impl, device, x)
    if kernel is None:
        rows = quantize(array_of(x), kind, by_group=by_group)
        end = (0, 0 if places is None else places - x.shape[0])
        return jnp.pad(rows.values, (end, (0, 0))), jnp.pad(rows.scale.T, (*by_group * [(0, 0)], end))
    quantized: tuple[jax.Array, jax.Array] = kernel.run(x, kind, places=places, by_group=by_group)
    return quantized
