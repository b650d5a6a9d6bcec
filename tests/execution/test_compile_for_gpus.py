"""Other processes compile for GPUs, which they do not touch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from jengine.execution.compile_children import CompileChildren, Job, Target
from jengine.execution.program_store import XZ
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import SamplerKey
from pallas_kernels.compilation import ahead_of_time
from tests.execution.test_gpu_programs import described
from tests.extras import compiler_for_gpus

compiler_for_gpus()


def test_other_processes_compile_for_a_gpu() -> None:
    """From the bytes of a spec, without tuning, as `jengine compile` does."""
    target = Target("h200", 1, 100 << 30)
    spec = dataclasses.replace(described("h200"), mesh=make_mesh(1, target.devices()))
    children = CompileChildren(1, target)
    try:
        result = children.compile(Job.of(spec, target), SamplerKey(8, "greedy")).result()
    finally:
        children.close()
    assert result.data.startswith(XZ) and result.memory.arguments > 0


def test_a_gpu_that_is_present_has_the_target_that_describes_it() -> None:
    [h200] = ahead_of_time.devices("h200", 1)
    assert ahead_of_time.target_of(h200) == "h200"
    part = SimpleNamespace(device_kind=h200.device_kind, core_count=16)  # as MIG divides them
    other = SimpleNamespace(device_kind="NVIDIA T4", core_count=40)
    assert ahead_of_time.target_of(part) is None and ahead_of_time.target_of(other) is None  # type: ignore[arg-type]
