"""XLA's all-reduces, compiled for absent GPUs: which of them it chooses, by size and number of devices."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.all_reduces import steps, sums
from benchmarks.machine import RESULTS
from jengine.capacity.planning.links import ONE_SHOT_BYTES, TWO_SHOT_BYTES, Cluster, Group
from jengine.devices.device_spec import device_spec
from jengine.execution.programs import UNTUNED, gpu_options, lower
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import TrunkKey
from pallas_kernels.compilation import ahead_of_time
from tests.compiling import compiled_with_thunks, optimized
from tests.execution.test_gpu_programs import HEADS, LAYERS, MODEL, described, elsewhere
from tests.execution.thunks import leaves
from tests.extras import compiler_for_gpus

compiler_for_gpus()

ROW = 8192  # bytes
NCCL, ONE_SHOT, TWO_SHOT = "default", "triton_one_shot", "triton_two_shot"


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
    [(_, found)] = {tuple(one.split()) for one in sums(text or "")}
    return found


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


RECORD = json.loads((RESULTS / "all_reduces.json").read_text())


def test_xla_replaces_some_of_nccls_sums() -> None:
    """By kernels that tell other devices when to read, once or twice, and wait; none has multimem."""
    for row in RECORD["steps"]:
        strategies = {name.split()[1] for name in row["hlo"]}
        kernels = strategies - {NCCL} and row["kind"] == "XLA's choice"
        assert row["launches"] == {"kCollectiveKernel" if kernels else "kAllReduce": sum(row["hlo"].values())}
        rounds = {ONE_SHOT: 1, TWO_SHOT: 2}.get(*strategies)
        signs = [
            f"{rounds} signals, {rounds} waits" in name and "0 multimem" in name for name in row["kernels"]
        ]
        assert signs == ([True] if kernels else [])


def check_steps(devices: int) -> None:
    rows = [row for row in RECORD["steps"] if row["devices"] == devices]
    assert [*steps(RECORD["target"], devices)] == rows


@pytest.mark.full
@pytest.mark.skipif(jax.__version__ != RECORD["machine"]["jax"], reason="others compile to other code")
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_steps_have_the_sums_of_the_record(devices: int) -> None:
    """Their HLO, and what XLA's kernels do in PTX."""
    with optimized():
        elsewhere(check_steps, devices)
