"""Products on GPUs by parameters of any format, in kernels where these support them; see `dispatch`.

`weights.product` is for any device.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.products.groups import Groups
from pallas_kernels.products.support import TARGETS
from pallas_kernels.products.weights import stored, weight_of
from pallas_kernels.targets import XLA, Choice, Impl


def explain_product(x: jax.Array, weight: Any, *, grouped: bool, device: jax.Device) -> Choice:
    """Which implementation multiplies by a weight on a GPU, and why not the newest one."""
    weight = stored(weight)
    if not grouped and weight.format.bits > 8:
        return Choice(XLA, None)  # cuBLAS multiplies what is not quantized
    if (why := weight.why_unsupported(x, grouped=grouped, device=device)) is not None:
        return Choice(XLA, why)
    return Choice(next(target.name for target in TARGETS if target.includes(device)), None)


def why_grouped_product_unsupported(
    x: jax.Array, weight: Any, *, device: jax.Device | None = None
) -> str | None:
    """Why no kernel for `grouped_product` supports these arrays, or None."""
    return stored(weight).why_unsupported(x, grouped=True, device=device)


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
