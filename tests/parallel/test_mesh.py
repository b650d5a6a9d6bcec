"""Logical axes to shardings."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jengine.checkpoints.hugging_face import model_config
from jengine.errors import InvalidArgument
from jengine.models import build
from jengine.parallel.mesh import make_mesh, shardings
from tests.golden.weights import VARIANTS


def test_mesh_of_one_device() -> None:
    mesh = make_mesh(1)
    assert mesh.shape == {"tensor": 1}
    assert mesh.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize("size", [0, 10_000])
def test_more_devices_than_there_are(size: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"tensor_parallel_size={size}: must be from 1 to {len(jax.devices())}"):
        make_mesh(size)


def test_parameters_over_two_devices() -> None:
    model = build(model_config(VARIANTS["llama_attention_bias"]), "float32", 64)
    placed = shardings(AbstractMesh((2,), ("tensor",), (AxisType.Auto,)), model.axes)
    attention, mlp = placed["layers"][0]["attention"], placed["layers"][0]["mlp"]
    assert placed["embed"].spec == placed["lm_head"].spec == P("tensor", None)
    assert attention["qkv"].spec == P("tensor", None, None)
    assert attention["qkv_bias"].spec == P("tensor", None)
    assert attention["o"].spec == P(None, "tensor")
    assert attention["o_bias"].spec == placed["norm"]["weight"].spec == P(None)
    assert mlp["gate_up"].spec == P("tensor", None, None)
    assert mlp["down"].spec == P(None, "tensor")
    shapes = jax.tree.map(lambda sharding, p: sharding.shard_shape(p.shape), placed, model.params)
    assert shapes["layers"][0]["attention"]["qkv"] == (1, 64, 64)  # one kv head with its queries on each
    assert shapes["layers"][0]["mlp"]["gate_up"] == (56, 2, 64)
