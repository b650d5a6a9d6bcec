"""Which kernels of GPUs multiply by parameters of any format; see `weight` for the products."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.products.weights import stored
from pallas_kernels.targets import Choice, explain, why_none


def explain_product(x: jax.Array, weight: Any, *, grouped: bool, device: jax.Device) -> Choice:
    """Which implementation multiplies by a weight on a GPU, and why not the newest one."""
    weight = stored(weight)
    return explain(weight.table(grouped=grouped), device, x, weight)


def why_product_unsupported(
    x: jax.Array, weight: Any, *, grouped: bool, device: jax.Device | None = None
) -> str | None:
    """Why no GPU's kernel multiplies rows x [rows, in] by a weight or parameter, or None."""
    weight = stored(weight)
    return why_none(weight.table(grouped=grouped), device, x, weight)
