"""Sums, norms and gated activations that are computed when they are needed, so that a kernel can compute them
as it quantizes the result.

They are only for code that is being traced: `Sum` remembers its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.elementwise.activations import gated
from pallas_kernels.elementwise.norm import rms_norm


class Sum:
    """x + y. It may be used like an array. If shapes or dtypes differ, it is computed at once."""

    def __init__(self, x: jax.Array | Sum, y: jax.Array) -> None:
        x = array_of(x)
        alike = x.shape == y.shape and x.dtype == y.dtype
        self._parts: tuple[jax.Array, jax.Array] | None = (x, y) if alike else None
        self._total: jax.Array | None = None if alike else jnp.add(x, y)
        self.shape, self.dtype = jnp.broadcast_shapes(x.shape, y.shape), jnp.result_type(x, y)

    @property
    def parts(self) -> tuple[jax.Array, jax.Array] | None:
        """x and y; None: the sum is known."""
        return self._parts

    def computed(self, total: jax.Array) -> None:
        """Sets the sum, if a kernel has computed it."""
        self._parts, self._total = None, total

    def __jax_array__(self) -> jax.Array:
        if self._parts is not None:
            self.computed(jnp.add(*self._parts))
        assert self._total is not None
        return self._total

    def __add__(self, other: Any) -> jax.Array:
        total: jax.Array = self.__jax_array__() + other
        return total

    def __mul__(self, other: Any) -> jax.Array:
        product: jax.Array = self.__jax_array__() * other
        return product


@dataclass(frozen=True)
class Normed:
    """rms_norm(x, weight, eps, offset), for x [rows, size]."""

    x: jax.Array | Sum
    weight: jax.Array
    eps: float
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype[Any]:
        return self.x.dtype

    def __jax_array__(self) -> jax.Array:
        return rms_norm(array_of(self.x), self.weight, self.eps, self.offset)


@dataclass(frozen=True)
class Gated:
    """activations.gated(gate_up, activation), for gate_up [rows, size, 2]."""

    gate_up: jax.Array
    activation: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.gate_up.shape[:2]

    @property
    def dtype(self) -> jnp.dtype[Any]:
        return self.gate_up.dtype

    def __jax_array__(self) -> jax.Array:
        return gated(self.gate_up, self.activation)


Rows = jax.Array | Normed | Gated  # inputs of a product


def array_of(x: jax.Array | Sum | Normed | Gated) -> jax.Array:
    """x, computed now."""
    return x.__jax_array__() if isinstance(x, Sum | Normed | Gated) else x
