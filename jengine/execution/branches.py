"""Work that a program skips on a CPU where no row needs it. On a GPU a branch would make XLA wait for the host: there it is always done."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax


def either[T](needed: jax.Array, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """work() if any of `needed`, bool [rows], is set, else otherwise(). On a GPU work(), which gives the same if none is."""
    result: T = lax.platform_dependent(cpu=lambda: lax.cond(needed.any(), work, otherwise), default=work)
    return result


def if_any(needed: jax.Array, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """change(x) if any of `needed` is set, else x, which is copied then. On a GPU change(x)."""
    return either(needed, lambda: change(x), lambda: x)
