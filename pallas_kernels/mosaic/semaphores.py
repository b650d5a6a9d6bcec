"""Counters in global memory by which thread blocks of a kernel wait for each other.

A semaphore is an int32 of an array that all blocks can reach. It is zero before a kernel and after it: `wait`
subtracts what the signals have added. So one array, cleared once, serves many kernels, one after the other.

What a warpgroup wrote before it signals is visible to the warpgroup that waits. Results that TMA stores are
written only after `wait_smem_to_gmem` without `wait_read_only`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu


def signal(semaphore: Any) -> None:
    """Adds one."""

    def semaphore_signal(_: Any, ref: Any) -> None:
        mgpu.utils.warpgroup_barrier()  # one thread signals for all
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(semaphore_signal)(semaphore)


def wait(semaphore: Any, count: jax.Array) -> None:
    """Waits until the semaphore is at least `count`, a positive number, and subtracts it."""

    def semaphore_wait(_: Any, ref: Any, count: Any) -> None:
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).wait(count.registers.item(), memory_scope="gpu")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))(semaphore_wait)(semaphore, count)
