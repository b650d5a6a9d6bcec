"""Parts of kernels for data-centre Blackwell: tensor memory, which tcgen05 instructions read and write."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.mosaic.versions import store

ROWS = 128  # of a product, each in a lane of tensor memory
LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a row in a thread


def wait_loaded() -> None:
    """Waits until the warp has loaded from tensor memory what it may overwrite afterwards.

    A warp of a warpgroup reaches a quarter of the lanes, so no other one needs to wait.
    """

    def loaded(_: Any) -> None:
        mgpu.utils.inline_ptx("tcgen05.wait::ld.sync.aligned;")

    plgpu.inline_mgpu()(loaded)()


def wait_stored() -> None:
    """Waits until the warpgroup has stored to tensor memory what its next product reads."""

    def stored(_: Any) -> None:
        mgpu.utils.inline_ptx("tcgen05.wait::st.sync.aligned;")
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
        mgpu.utils.warpgroup_barrier()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)

    plgpu.inline_mgpu()(stored)()


def together() -> None:
    """Joins the threads of each warp, between a product and a barrier of the warpgroup.

    Otherwise the compiler may copy the barrier into the branch of the thread that starts the product, which
    then waits for the others forever: Mosaic's inline code for the barrier is not marked as convergent.
    """

    def joined(_: Any) -> None:
        mgpu.utils.warp_barrier()

    plgpu.inline_mgpu()(joined)()


def store_transposed(target: Any, values: jax.Array) -> None:
    """Writes values [ROWS, n] to shared memory [n, ROWS]. A warp writes 32 adjacent numbers at once."""
    store(target.transpose((1, 0)), plgpu.layout_cast(values, plgpu.Layout.TCGEN05_TMEM_NATIVE(1)))
