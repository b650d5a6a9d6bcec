"""Numbers of devices for each axis, and what lies over them."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jengine.base.errors import InvalidArgument
from jengine.parallel.layout import Layout
from jengine.parallel.mesh import partition, stage_meshes

GATE_UP = ("experts", "ffn", None, None)


def test_products() -> None:
    layout = Layout(stages=2, data=4, tensor=2, expert_parallel=True)
    assert (layout.devices, layout.stage_devices, layout.expert_shards) == (16, 8, 8)
    assert Layout(data=4, tensor=2).expert_shards == 1
    assert Layout().devices == 1


@pytest.mark.parametrize("size", [0, True, 1.0])
def test_sizes_are_refused_by_their_options_names(size: object) -> None:
    with pytest.raises(
        InvalidArgument, match=f"data_parallel_size={size}: must be a whole number, at least 1"
    ):
        Layout(data=size)  # type: ignore[arg-type]


def test_too_few_devices() -> None:
    layout = Layout(stages=50, data=3, tensor=100)
    sizes = "pipeline_parallel_size=50, data_parallel_size=3, tensor_parallel_size=100"
    with pytest.raises(InvalidArgument, match=f"devices='{sizes}': needs 15000 devices, of"):
        stage_meshes(layout)


def test_rules_by_layout() -> None:
    alone = AbstractMesh((2,), ("tensor",), (AxisType.Auto,))
    ranks = AbstractMesh((4, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    for mesh in (alone, ranks):
        assert partition(GATE_UP, mesh) == P(None, "tensor", None, None)
        for dense in ("ffn", "vocab", "heads"):
            for expert_parallel in (False, True):
                spec = partition((None, dense), mesh, expert_parallel=expert_parallel)
                assert spec == P(None, "tensor")
    assert partition(GATE_UP, alone, expert_parallel=True) == P("tensor", None, None, None)
    assert partition(GATE_UP, ranks, expert_parallel=True) == P(("data", "tensor"), None, None, None)
