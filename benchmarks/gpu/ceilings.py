"""A device's measured peak rates: memory copies and matrix products."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu.timing import chained, median


class Ceilings(NamedTuple):
    bandwidth: float  # bytes per second, read and written
    # operations per second of a bfloat16 product with float32 sums, or on a CPU of a float32 product
    rate: float


@functools.cache
def ceilings(small: bool) -> Ceilings:
    """This device's peak rates, measured once per process. small: small sizes, to test the code on a CPU."""
    words, size = (1 << 20, 256) if small else (1 << 28, 8192)
    x = jax.random.bits(jax.random.key(0), (words,))
    copies = jax.jit(jnp.copy), jax.jit(lambda x: x ^ 1)  # the runtime's copy, and a kernel
    copy = min(median(partial(copy, x)) for copy in copies)
    dtype = jnp.float32 if small else jnp.bfloat16
    a, b = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(1)))
    b = b * size**-0.5  # keeps the magnitude of repeated products
    product = chained(lambda a, _, b: lax.dot(a, b, preferred_element_type=dtype), a, None, b)
    return Ceilings(2 * x.nbytes / copy, 2 * size**3 / product)
