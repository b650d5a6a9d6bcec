"""Functions with several Mosaic kernels, compiled for a GPU that is not there and executed on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compilation.ahead_of_time import device, lower_for
from tests.extras import compiler_for_gpus
from tests.kernels.test_ahead_of_time import half_moved
from tools.ptx_machine.emulate import Emulation
from tools.ptx_machine.machine import Result
from tools.ptx_machine.schedules import Schedule

compiler_for_gpus()

X = jnp.asarray(np.arange(64 * 128, dtype=np.float32).reshape(64, 128))
SCRATCH = plgpu.SMEM(X.shape, X.dtype), plgpu.Barrier()


def copied(change: Any) -> Any:
    """A kernel's body: copies to shared memory, changes that, and copies back."""

    def body(x_ref: Any, out_ref: Any, smem: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(x_ref, smem, arrived)
        plgpu.barrier_wait(arrived)
        smem[...] = change(smem[...])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return body


def kernel(change: Any, name: str) -> Any:
    return plgpu.kernel(out_type=X, scratch_types=SCRATCH, kernel_name=name)(copied(change))


def in_place(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)

    def body(ref: Any, smem: Any, arrived: Any) -> None:
        copied(lambda x: x - 1)(ref, ref, smem, arrived)

    plgpu.kernel(body, scratch_types=SCRATCH, kernel_name="one")(ref)
    return jax.freeze(ref)


def several(x: jax.Array, more: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Kernels of one name, between operations of XLA."""
    once = kernel(lambda x: x + 1, "one")(x)
    twice = jax.jit(kernel(lambda x: 2 * x, "one"))(once)
    return in_place(twice) + more["more"], once


def emulation(function: Any, *args: Any) -> Emulation:
    return Emulation(partial(lower_for, device("h200")), function, *args)


def test_every_kernel_is_executed_in_its_place() -> None:
    run = emulation(several, X, {"more": X})
    for x in (X, 3 * X):
        got, once = run(x, {"more": X}, schedule=Schedule(seed=1, order="late", garbage="random"))
        np.testing.assert_array_equal(once, x + 1)
        np.testing.assert_array_equal(got, 2 * (x + 1) - 1 + X)
        assert [one.kernel for one in run.runs] == ["one"] * 3
        results: list[Result] = [one.result for one in run.runs]
        assert not any(result.errors for result in results)
        assert all(result.finished and result.instructions > 100 for result in results)


def test_a_function_can_be_compiled_again() -> None:
    """Mosaic would not compile the same kernel twice in a process."""
    for _ in range(2):
        np.testing.assert_array_equal(emulation(in_place, X)(X), X - 1)


def test_a_copy_that_is_not_awaited_is_reported_with_its_line() -> None:
    def body(x_ref: Any, out_ref: Any, smem: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(x_ref, smem, arrived)
        smem[...] = 2 * smem[...]  # this line
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    run = emulation(
        lambda x: plgpu.kernel(body, out_type=X, scratch_types=SCRATCH, kernel_name="early")(x), X
    )
    run(X)
    line = body.__code__.co_firstlineno + 2
    assert any(f"{__file__}:{line}" == error.source for error in run.runs[0].result.errors)


@pytest.mark.parametrize("rows", [4, 8])
def test_a_layout_that_mosaic_infers_wrongly_exchanges_columns(rows: int) -> None:
    """See docs/guides/kernels.md. Pallas's interpreter knows no layouts."""
    x = jnp.asarray(np.arange(rows * 128).reshape(rows, 128) % 256, jnp.bfloat16)
    got = emulation(lambda x: half_moved(rows)[0](x), x)(x)
    last, exchanged = x[:, 64:], jnp.concatenate([x[:, 96:], x[:, 64:96]], axis=1)
    np.testing.assert_array_equal(got[:, :64], exchanged if rows == 4 else last)


def test_kernels_that_are_made_elsewhere_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"elsewhere.*must be called while the function is traced"):
        emulation(kernel(lambda x: x + 1, "elsewhere"), X)


def test_kernels_that_differ_between_devices_are_refused() -> None:
    calls = []

    def twice_then_once(x: jax.Array) -> jax.Array:
        calls.append(1)
        for _ in range(3 - len(calls)):
            x = kernel(lambda x: x + 1, "one")(x)
        return x

    with pytest.raises(RuntimeError, match="2 kernels for the GPU, but another number for the CPU"):
        emulation(twice_then_once, X)
