"""Logical axes to shardings."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jengine.base.errors import InvalidArgument
from jengine.checkpoints.hugging_face import model_config
from jengine.models import build
from jengine.parallel.mesh import make_mesh, with_shardings
from tests.golden.weights import VARIANTS


def test_mesh_of_one_device() -> None:
    mesh = make_mesh(1)
    assert mesh.shape == {"tensor": 1}
    assert mesh.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize("size", [0, 10_000])
def test_more_devices_than_there_are(size: int) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"tensor_parallel_size={size}: must be from 1 to {len(jax.devices())}"
    ):
        make_mesh(size)


def test_parameters_over_two_devices() -> None:
    model = build(model_config(VARIANTS["llama_attention_bias"]), "float32", 64)
    params = with_shardings(AbstractMesh((2,), ("tensor",), (AxisType.Auto,)), model.params, model.axes)
    specs = jax.tree.map(lambda p: p.sharding.spec, params)
    attention, mlp = specs["layers"][0]["attention"], specs["layers"][0]["mlp"]
    assert specs["embed"] == specs["lm_head"] == P("tensor", None)
    assert attention["qkv"] == P("tensor", None, None)
    assert attention["qkv_bias"] == P("tensor", None)
    assert attention["o"] == P(None, "tensor")
    assert attention["o_bias"] == specs["norm"]["weight"] == P(None)
    assert mlp["gate_up"] == P("tensor", None, None)
    assert mlp["down"] == P(None, "tensor")
    shapes = jax.tree.map(lambda p: p.sharding.shard_shape(p.shape), params)
    assert shapes["layers"][0]["attention"]["qkv"] == (1, 64, 64)  # one kv head with its queries on each
    assert shapes["layers"][0]["mlp"]["gate_up"] == (56, 2, 64)
