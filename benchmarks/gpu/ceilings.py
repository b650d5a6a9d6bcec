"""A device's two ceilings: how fast it copies, and how fast it multiplies matrices."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.timing import chained, median


class Ceilings(NamedTuple):
    bandwidth: float  # bytes a second, read and written
    rate: float  # operations a second of a bfloat16 product with float32 sums; float32's on a CPU


@functools.cache
def ceilings(small: bool) -> Ceilings:
    """Of this device, measured once a process. small: for a CPU, to see that this runs."""
    words, size = (1 << 20, 256) if small else (1 << 28, 8192)
    x = jax.random.bits(jax.random.key(0), (words,))
    copies = jax.jit(jnp.copy), jax.jit(lambda x: x ^ 1)  # the runtime's own copy, and a kernel's
    copy = min(median(partial(copy, x)) for copy in copies)
    dtype = jnp.float32 if small else jnp.bfloat16
    a, b = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(1)))
    b = b * size**-0.5  # so that products of products stay as large
    product = chained(lambda a, _, b: lax.dot(a, b, preferred_element_type=dtype), a, None, b)
    return Ceilings(2 * x.nbytes / copy, 2 * size**3 / product)
