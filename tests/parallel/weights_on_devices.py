"""Weights on several devices. test_many_devices.py runs this as it runs many_devices.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine import trainer_weights
from jengine.base.compiles import compile_count
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.engine.operations import UpdateWeights
from jengine.engine.start import start_engine
from jengine.models import build
from jengine.parallel.collectives import TENSOR
from tests.checkpoints.trainer_trees import levanter
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, run
from tests.golden.weights import VARIANTS, weights, write_model


def test_a_callers_mesh_and_sharded_weights(tmp_path: Path) -> None:
    """Bits are those of the first devices with the folder's weights. Arrays come from a trainer's mesh of all
    devices.
    """
    write_model(tmp_path / "whole", "llama_mqa")
    trainer = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    params = {}
    for name, array in weights("llama_mqa").items():
        axes = ("fsdp", "tp") if array.ndim == 2 and array.shape[0] % 4 == 0 else ()
        params[name] = jax.device_put(array, NamedSharding(trainer, PartitionSpec(*axes)))
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    mesh = Mesh(np.array(jax.devices()[6:4:-1]), ("model",), axis_types=(AxisType.Explicit,))
    options = {**SMALL, "max_model_len": 64, "tensor_parallel_size": 2, "dtype": "float32"}
    with on_demand(), jax.set_mesh(trainer):
        expected, _ = start_engine(EngineConfig.of(str(tmp_path / "whole"), options), progress=False)
        engine, _ = start_engine(
            EngineConfig.of(str(tmp_path / "bare"), options), mesh=mesh, params=params, progress=False
        )
    params_of = [one.runner.worker.state.leaves for one in (engine, expected)]  # type: ignore[attr-defined]
    jax.tree.map(np.testing.assert_array_equal, *params_of)
    assert {device.id for leaf in jax.tree.leaves(params_of[0]) for device in leaf.sharding.device_set} == {
        5,
        6,
    }
    work = [
        ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)),
        ([8] * 20, SamplingParams(seed=3, max_tokens=8)),
    ]
    found = [
        [(answer.tokens, [update.logprobs for update in answer.updates]) for answer in run(one, work)]
        for one in (engine, expected)
    ]
    assert found[0] == found[1]
    axes = [tuple(leaf.sharding.spec) for leaf in jax.tree.leaves(params_of[0])]
    assert any(TENSOR in spec for spec in axes)


def test_layouts_hold_every_head_once() -> None:
    """For every number of heads, kv heads and devices, the q rows and o columns of a head are on the same
    device.
    """
    from jengine.checkpoints.hugging_face import model_config
    from jengine.checkpoints.safetensors import Tensor
    from jengine.checkpoints.weights import assemble

    for heads, kv_heads in ((4, 1), (4, 2), (4, 4), (6, 3), (6, 1), (14, 2), (12, 12)):
        changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4}
        config = model_config({**VARIANTS["llama_gqa"], **changes})
        for devices in (1, 2, 3, 4, 8):
            model = build(config, "float32", 64, shards=devices)
            attention, sources = (tree["layers"][0]["attention"] for tree in (model.params, model.sources))
            numbers = {}
            for piece in (*sources["qkv"], *sources["o"]):
                along = 1 if "o_proj" in piece.name else 0
                channel = np.arange(1, piece.shape[along] + 1, dtype=np.float32)
                shape = (1, -1) if along else (-1, 1)
                numbers[piece.name] = Tensor(Path("."), np.broadcast_to(channel.reshape(shape), piece.shape))
            laid = model.config
            qkv = assemble(attention["qkv"], sources["qkv"], numbers)[..., 0].reshape(
                laid.num_kv_heads_padded, laid.group_size_padded + 2, 4
            )
            o = assemble(attention["o"], sources["o"], numbers)[0].reshape(
                laid.num_kv_heads_padded, laid.group_size_padded, 4
            )
            np.testing.assert_array_equal(qkv[:, :-2], o)
            assert sorted(q for q in o[..., 0].ravel() if q) == [1 + 4 * head for head in range(heads)]
            for kv in range(laid.num_kv_heads_padded):
                for q in o[kv, :, 0]:
                    if q:  # reads the kv head that it reads in the checkpoint
                        assert qkv[kv, -2, 0] == qkv[kv, -1, 0] == 1 + 4 * ((int(q) - 1) // 4 // config.group)
            assert laid.num_kv_heads_padded % devices == 0


def test_sharded_weights_are_replaced(tmp_path: Path) -> None:
    """By a checkpoint's names, from a trainer's mesh; and by parameters, without a copy. Nothing is
    compiled.
    """
    write_model(tmp_path, "llama_mqa")
    trainer = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    changed = {name: 1.1 * array for name, array in weights("llama_mqa").items()}
    given = {}
    for name, array in changed.items():
        axes = ("fsdp", "tp") if array.ndim == 2 and array.shape[0] % 4 == 0 else ()
        given[name] = jax.device_put(array, NamedSharding(trainer, PartitionSpec(*axes)))
    options = {**SMALL, "max_model_len": 64, "tensor_parallel_size": 2, "dtype": "float32"}
    with on_demand():
        config = EngineConfig.of(str(tmp_path), {**options, "weight_updates": True})
        engine, _ = start_engine(config, progress=False)
        expected, _ = start_engine(EngineConfig.of(str(tmp_path), options), params=changed, progress=False)
    moved = jax.device_put(expected.runner.worker.state.leaves, jax.devices()[3])  # type: ignore[attr-defined]
    counted = compile_count()
    engine.do(UpdateWeights(given))
    assert compile_count() == counted, "by a checkpoint's names"
    leaves = [one.runner.worker.state.leaves for one in (engine, expected)]  # type: ignore[attr-defined]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
    tree = jax.tree.unflatten(jax.tree.structure(engine.weights.params), leaves[1])
    engine.do(UpdateWeights(tree))
    mine = engine.runner.worker.state.leaves  # type: ignore[attr-defined]
    assert all(one is other for one, other in zip(mine, leaves[1], strict=True))
    engine.do(UpdateWeights(jax.tree.unflatten(jax.tree.structure(tree), moved)))
    jax.tree.map(np.testing.assert_array_equal, engine.runner.worker.state.leaves, leaves[1])  # type: ignore[attr-defined]
    assert compile_count() == counted

    def on_trainer(array: np.ndarray) -> jax.Array:
        axes = ("fsdp", "tp") if array.ndim > 1 and array.shape[-2] % 4 == 0 else ()
        spec = PartitionSpec(*[None] * (array.ndim - 2), *axes) if axes else PartitionSpec()
        return jax.device_put(array, NamedSharding(trainer, spec))

    stacked = jax.tree.map(on_trainer, levanter(weights("llama_mqa"), VARIANTS["llama_mqa"]))
    for factor in (3.0, 1.1):
        counted = compile_count()
        tree = jax.tree.map(lambda leaf, factor=factor: factor * leaf, stacked)
        engine.do(UpdateWeights(trainer_weights(tree, "levanter")))
    assert compile_count() == counted, "by a trainer's stacked layers"
    jax.tree.map(np.testing.assert_array_equal, engine.runner.worker.state.leaves, leaves[1])  # type: ignore[attr-defined]
    work = [([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))]
    assert run(engine, work)[0].tokens == run(expected, work)[0].tokens
