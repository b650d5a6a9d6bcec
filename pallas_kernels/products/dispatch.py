"""Products on GPUs by parameters of any format, in kernels where these support them; see `dispatch`.

`weights.product` is for any device.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.products.groups import Groups
from pallas_kernels.products.weights import stored, weight_of
from pallas_kernels.targets import Choice, Impl, explain, why_none


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


def grouped_product(
    x: jax.Array, weight: Any, groups: Groups, *, impl: Impl = "auto", device: jax.Device | None = None
) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: [places, in], rows in the order of `groups.grouped`.
        weight: a weight or parameter [groups, *out, in].
        impl, device: see `dispatch`.

    Returns:
        [places, *out], in x's dtype; undefined in places without a row.

    Raises:
        ValueError: impl is "mosaic" or "llvm", and this kernel does not support the call.
    """
    return weight_of(weight).grouped_product(x, groups, impl=impl, device=device)
