"""Semaphores in global memory order what blocks of a kernel write and read, and are zero again afterwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.semaphores import signal, wait
from pallas_kernels.mosaic.versions import store
from tests.kernels.interpreted import RACES, interpret
from tests.kernels.semaphores_model import at_once

BLOCKS, LENGTH = 3, 128


def summed(x: jax.Array, fault: str = "") -> jax.Array:
    """The sum of x [BLOCKS, LENGTH] over blocks: each copies its row to a scratch array, from which the last
    adds all.
    """

    def kernel(x_ref: Any, signals: Any, out_ref: Any, rows_ref: Any, smem: Any) -> None:
        block = lax.axis_index("block")

        def load(ref: Any) -> jax.Array:
            loaded: jax.Array = plgpu.load(
                ref, layout=plgpu.Layout.WG_STRIDED((LENGTH,), vec_size=1), optimized=False
            )
            return loaded

        def copy(to: Any, values: jax.Array) -> None:
            store(smem, values)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=fault == "only reads are awaited")

        copy(rows_ref.at[block], load(x_ref.at[block]))

        @pl.when(block < BLOCKS - 1)
        def _() -> None:
            signal(signals.at[1])

        @pl.when(block == BLOCKS - 1)
        def _() -> None:
            if fault != "no wait":
                wait(signals.at[1], block - (fault == "one signal is not awaited"))
            total = load(rows_ref.at[0])
            for other in range(1, BLOCKS):
                total += load(rows_ref.at[other])
            copy(out_ref, total)

    shapes = jax.ShapeDtypeStruct((LENGTH,), jnp.float32), jax.ShapeDtypeStruct((BLOCKS, LENGTH), jnp.float32)
    run = plgpu.kernel(
        kernel,
        out_type=shapes,
        scratch_types=[plgpu.SMEM((LENGTH,), jnp.float32)],
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=RACES,
    )
    signals = jax.new_ref(jnp.zeros(2, jnp.int32))
    run(x, signals)
    out: jax.Array = run(x, signals)[0]  # with the same semaphores
    return out


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_block_sees_what_others_wrote_before_they_signalled(concurrent: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (BLOCKS, LENGTH))
    if concurrent:
        with at_once():
            got = interpret(jax.jit(summed), x)
    else:
        got = interpret(jax.jit(summed), x)
    np.testing.assert_allclose(got, x.sum(0), rtol=1e-6)


@pytest.mark.parametrize("fault", ["no wait", "one signal is not awaited", "only reads are awaited"])
def test_a_fault_is_found(fault: str) -> None:
    with (
        at_once(),
        pytest.raises(
            (AssertionError, jax.errors.JaxRuntimeError), match=r"RACE DETECTED|races_found|not zero"
        ),
    ):
        interpret(jax.jit(summed, static_argnums=1), jnp.ones((BLOCKS, LENGTH)), fault)
