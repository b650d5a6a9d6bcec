"""Parts of kernels for data-centre Blackwell: tensor memory, which tcgen05 instructions read and write."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

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
