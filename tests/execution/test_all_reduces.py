"""XLA's all-reduces, compiled for absent GPUs: which of them it chooses, by size and number of devices."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jengine.capacity.planning.links import ONE_SHOT_BYTES, TWO_SHOT_BYTES, Cluster, Group
from jengine.devices.device_spec import device_spec
from jengine.execution.programs import UNTUNED, gpu_options, lower
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import TrunkKey
from pallas_kernels.compilation import ahead_of_time
from tests.compiling import compiled_with_thunks
from tests.execution.test_gpu_programs import HEADS, LAYERS, MODEL, described, elsewhere
from tests.execution.thunks import leaves
from tests.extras import compiler_for_gpus

compiler_for_gpus()

ROW = 8192  # bytes
NCCL, ONE_SHOT, TWO_SHOT = "DEFAULT", "TRITON_ONE_SHOT", "TRITON_TWO_SHOT"


def strategy(target: str, devices: int, size: int, **options: Any) -> str:
    """What XLA says of the sum of `size` bytes on each device."""
    mesh = make_mesh(devices, ahead_of_time.devices(target, devices))
    function = jax.shard_map(
        lambda x: lax.psum(2 * x, "tensor"), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
        check_vma=False,
    )  # fmt: skip
    rows = jax.ShapeDtypeStruct(
        (size // ROW, ROW // 2), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    text = jax.jit(function).lower(rows).compile(compiler_options=options).as_text()
    [found] = set(re.findall(r"KERNEL_STRATEGY_(\w+)", text or ""))
    return str(found)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_small_sums_use_the_kernels_that_plans_assume(devices: int) -> None:
    one, two = ONE_SHOT_BYTES // devices, TWO_SHOT_BYTES // devices
    assert strategy("h100", devices, ROW) == strategy("h100", devices, one) == ONE_SHOT
    assert strategy("h100", devices, one + ROW) == strategy("h100", devices, two) == TWO_SHOT
    assert strategy("h100", devices, two + ROW) == NCCL
    assert strategy("h100", devices, ROW, xla_gpu_experimental_use_collective_kernels="") == NCCL


@pytest.mark.parametrize(
    ("target", "devices"), [("h200", 4), ("b200", 4), ("a100", 4), ("rtx5090", 2), ("h100", 3), ("h100", 6)]
)
def test_the_others_use_nccl(target: str, devices: int) -> None:
    """Before Hopper, without NVLink, and for other numbers of devices."""
    known = Cluster.of(device_spec(target), devices).has_kernels(Group(devices, 1))
    assert strategy(target, devices, ROW) == (ONE_SHOT if known else NCCL)
    assert known == (target in ("h200", "b200"))


def check_launches(devices: int) -> None:
    spec = described("h200", devices, {**MODEL, **HEADS}, max_model_len=8192)
    _, thunks = compiled_with_thunks(lower(spec, TrunkKey(8, 1)), {**gpu_options(spec), **UNTUNED})
    kinds = Counter(thunk.kind for thunk in leaves(thunks))
    assert len(thunks) == 1
    assert (kinds["kCollectiveKernel"], kinds["kAllReduce"]) == (2 * LAYERS + 1, 0)


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.full)])
def test_a_step_is_one_command_buffer(devices: int) -> None:
    """With its sums, beside which XLA would launch every kernel alone otherwise."""
    elsewhere(check_launches, devices)
