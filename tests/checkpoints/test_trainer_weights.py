"""Weights as trainers store them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx

from jengine import EngineConfig, InvalidArgument, ModelError, trainer_weights
from jengine.base.compiles import compile_count
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import UpdateWeights
from jengine.spi import LeafLayout, start_engine
from tests.checkpoints.trainer_trees import TREES, NamedArray, keras_hub, levanter, maxtext
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.weights import VARIANTS, weights, write_model

CASES = [
    ("levanter", "llama_gqa"),
    ("levanter", "llama_tied"),
    ("levanter", "qwen2_untied"),
    ("levanter", "qwen3_untied"),
    ("maxtext_llama", "llama_tied"),
    ("maxtext", "qwen2_untied"),
    ("maxtext", "qwen3_untied"),
    ("maxtext", "qwen3_moe"),
    ("keras_hub", "llama_gqa"),
    ("keras_hub", "qwen2_untied"),
    ("keras_hub", "qwen3_untied"),
]
LLAMA = "llama_tied"  # the square root of its heads' size is a power of two


def assert_equal(weights_of_trainer: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert weights_of_trainer.keys() == expected.keys()
    for name, array in expected.items():
        assert weights_of_trainer[name].shape == array.shape
        np.testing.assert_array_equal(np.asarray(weights_of_trainer[name]), array, name)


@pytest.mark.parametrize("layout, variant", CASES)
def test_tensors_equal_those_of_the_checkpoint(layout: str, variant: str) -> None:
    """From the host's arrays and from a device's, with stacked layers and without."""
    tensors, config = weights(variant), VARIANTS[variant]
    tree = TREES[layout](tensors, config)
    assert_equal(trainer_weights(tree, layout), tensors)
    if layout != "keras_hub":
        assert_equal(trainer_weights(jax.tree.map(jnp.asarray, tree), layout), tensors)
        assert_equal(trainer_weights(TREES[layout](tensors, config, stacked=False), layout), tensors)


def test_an_orbax_checkpoint_and_a_flax_module(tmp_path: Path) -> None:
    tensors = weights(LLAMA)
    tree = jax.tree.map(jnp.asarray, maxtext(tensors, VARIANTS[LLAMA]))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "items", {"params": tree})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "items")
    assert_equal(trainer_weights(restored["params"], "maxtext_llama"), tensors)

    class Mlp(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))

    module = Mlp()
    mlp = {"up.kernel": LeafLayout(("mlp.up_proj.weight",), "iO")}
    for flax in (module, nnx.state(module)):
        assert_equal(trainer_weights(flax, mlp), {"mlp.up_proj.weight": np.asarray(module.up.kernel[...]).T})


def test_leaves_that_do_not_fit_are_named() -> None:
    tensors, config = weights(LLAMA), VARIANTS[LLAMA]
    tree = levanter(tensors, config)
    tree["transformer"]["norm"]["bias"] = NamedArray(np.ones(3, np.float32))
    with pytest.raises(InvalidArgument, match=r"^params='transformer\.norm\.bias \[3\]': is no leaf of"):
        trainer_weights(tree, "levanter")
    keras = keras_hub(tensors, config)
    keras["transformer_layer_1/self_attention/query/kernel"].value = np.ones((3, 4), np.float32)
    with pytest.raises(
        InvalidArgument, match=r"self_attention\.query\.kernel \[3, 4\]': must have 3 axes, as iHD in"
    ):
        trainer_weights(keras, "keras_hub")
    twice = {"a": np.ones(3), "b": np.ones(3)}
    with pytest.raises(InvalidArgument, match=r"^params='b \[3\]': gives norm a second time"):
        trainer_weights(twice, dict.fromkeys(twice, LeafLayout(("norm",))))
    with pytest.raises(
        InvalidArgument, match=r"^layout='keras': must be a mapping or one of levanter, maxtext,"
    ):
        trainer_weights(keras, "keras")


def started(folder: Path, params: Any = None) -> Engine:
    write_model(folder, LLAMA)
    options = {**SMALL, "max_model_len": 64, "weight_updates": True, "dtype": "float32"}
    with on_demand():
        return start_engine(EngineConfig.of(str(folder), options), params=params, progress=False)[0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return started(tmp_path_factory.mktemp("model"))


def test_an_engine_starts_with_a_trainers_weights(tmp_path: Path) -> None:
    tree = jax.tree.map(jnp.asarray, levanter(changed(2.0), VARIANTS[LLAMA]))
    engine = started(tmp_path, trainer_weights(tree, "levanter"))
    leaves = [*engine.runner.worker.state.leaves]  # type: ignore[attr-defined]
    engine.do(UpdateWeights(changed(2.0)))
    jax.tree.map(np.testing.assert_array_equal, leaves, [*engine.runner.worker.state.leaves])  # type: ignore[attr-defined]


def changed(factor: float) -> dict[str, np.ndarray]:
    return {name: np.float32(factor) * array for name, array in weights(LLAMA).items()}


@pytest.mark.parametrize("layout", ["levanter", "maxtext_llama", "keras_hub"])
def test_updates_equal_those_with_a_checkpoints_tensors(engine: Engine, layout: str) -> None:
    """Nothing is compiled after the first."""
    counted = 0
    for factor in (2.0, 0.5, 4.0):
        tree = TREES[layout](changed(factor), VARIANTS[LLAMA])
        tree = tree if layout == "keras_hub" else jax.tree.map(jnp.asarray, tree)
        counted = compile_count()
        engine.do(UpdateWeights(trainer_weights(tree, layout)))
    assert compile_count() == counted
    leaves = [*engine.runner.worker.state.leaves]  # type: ignore[attr-defined]
    engine.do(UpdateWeights(changed(4.0)))
    jax.tree.map(np.testing.assert_array_equal, leaves, [*engine.runner.worker.state.leaves])  # type: ignore[attr-defined]


def test_updates_name_the_leaf_that_is_missing_or_has_another_shape(engine: Engine) -> None:
    before = [*engine.runner.worker.state.leaves]  # type: ignore[attr-defined]
    tree = levanter(weights(LLAMA), VARIANTS[LLAMA])
    del tree["transformer"]["layers"]["stacked"]["mlp"]["up_proj"]
    missing = r"mlp\.up_proj\.weight.*is missing: no leaf transformer\.layers\.stacked\.mlp\.up_proj\.weight"
    with pytest.raises(ModelError, match=missing):
        engine.do(UpdateWeights(trainer_weights(tree, "levanter")))
    keras = keras_hub(weights(LLAMA), VARIANTS[LLAMA])
    path = "transformer_layer_1/feedforward_gate_dense/kernel"
    gate = keras.pop(path)
    with pytest.raises(
        ModelError, match=r"is missing: no leaf transformer_layer_1\.feedforward_gate_dense\.kernel"
    ):
        engine.do(UpdateWeights(trainer_weights(keras, "keras_hub")))
    gate.value = gate.value[:, :-1]
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.gate_proj\.weight.*has shape .*; the configuration needs"
    ):
        engine.do(UpdateWeights(trainer_weights(keras | {path: gate}, "keras_hub")))
    array = jnp.ones((3, 4))
    weights_of_trainer = trainer_weights({"up": {"kernel": array}}, {"up.kernel": LeafLayout(("up",), "iO")})
    array.delete()
    with pytest.raises(ModelError, match=r"up.*was deleted"):
        engine.do(UpdateWeights(weights_of_trainer))
    assert all(a is b for a, b in zip(before, engine.runner.worker.state.leaves, strict=True))  # type: ignore[attr-defined]
