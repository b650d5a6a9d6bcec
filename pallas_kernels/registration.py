"""Registers kernels for CPUs with XLA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from pallas_kernels import devices
from pallas_kernels.cache.support import why_no_cpu_cache
from pallas_kernels.products.weights import prepare as prepare_product
from pallas_kernels.quantization.quantized import Pages
from pallas_kernels.targets import on_cpu


def prepare(
    weights: Iterable[Any], q: Any, k_pages: Pages, *, ahead: bool = False, device: jax.Device | None = None
) -> None:
    """Registers with XLA the CPU kernels that programs over these arrays call. Call it before such programs
    are loaded.

    It does nothing on other devices.

    Args:
        weights: parameters of products. They, q and k_pages may be any objects with shapes and dtypes.
        q: queries of attention, [..., heads, head_dim].
        ahead: whether queries of tiles may see later tokens.
    """
    if on_cpu(device) and devices.cpu_refused() is None:
        from pallas_kernels.attention.cpu import attention
        from pallas_kernels.elementwise import cpu as elementwise

        if why_no_cpu_cache(k_pages, k_pages) is None:
            attention.prepare(q, k_pages, ahead=ahead)
        elementwise.prepare(str(q.dtype))
        for weight in weights:
            if len(weight.shape) > 1:
                prepare_product(weight)
