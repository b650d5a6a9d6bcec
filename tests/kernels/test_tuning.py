"""How decode attention uses a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax

from pallas_kernels import targets
from pallas_kernels.attention import work_list

GPU: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", core_count=100)


def pages(cache: str, head_dim: int) -> Any:
    return jax.ShapeDtypeStruct((2, 1, 64, head_dim), cache)


def test_blocks_are_as_many_as_the_chip_holds() -> None:
    """Those of head dim 256, and of eight-bit caches of head dim 128, take more than half of a
    multiprocessor's shared memory.
    """
    found = {
        (cache, dim): work_list.decode_blocks(pages(cache, dim), GPU)
        for cache in ("bfloat16", "int8", "uint8")
        for dim in (64, 128, 256)
    }
    small = {(cache, 64) for cache in ("bfloat16", "int8", "uint8")}
    assert {case for case, blocks in found.items() if blocks == 200} == {*small, ("bfloat16", 128)}
    assert {*found.values()} == {100, 200}
    elsewhere: Any = SimpleNamespace(device_kind="NVIDIA H100")
    assert work_list.decode_blocks(pages("bfloat16", 128), elsewhere) == 2 * targets.CORES
