"""Sums of scores whose lines are half padding have the bits of sums of all lines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.few_lines import USED, first_lines, line_sums, per_line
from pallas_kernels.mosaic.hopper import ROWS
from tests.extras import compiler_for_gpus
from tests.kernels.executed import FEW, Executed

compiler_for_gpus()


def kernel(x: Any, every: Any, first: Any) -> None:
    scores = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
    every[...] = scores.sum(axis=1)
    first[...] = per_line(line_sums(first_lines(scores)))


def test_sums_of_first_lines_have_the_bits_of_sums_of_all_lines() -> None:
    sums = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 64)), jnp.float32)

    @jax.jit
    def run(x: jax.Array) -> Any:
        return plgpu.kernel(kernel, out_type=(sums, sums))(x)

    every, first = Executed(FEW[:1]).runner.run(run, x)
    used = np.arange(ROWS) % 16 < USED
    np.testing.assert_array_equal(np.asarray(every)[used], np.asarray(first)[used])
