"""Branches that skip work no row needs. On a GPU a branch would make XLA wait for the host, so the work is
always done.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax


def either[T](needed: jax.Array, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """work() if any of `needed`, bool [rows], is set, otherwise otherwise().

    On a GPU always work(), which must give the same result if none is set.
    """
    result: T = lax.platform_dependent(cpu=lambda: lax.cond(needed.any(), work, otherwise), default=work)
    return result


def if_any(needed: jax.Array, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """change(x) if any of `needed` is set, otherwise a copy of x. On a GPU always change(x)."""
    return either(needed, lambda: change(x), lambda: x)
