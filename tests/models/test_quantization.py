"""Quantized models compared with the same models with dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoints import load, read_config
from jengine.models import Model, Params, build
from jengine.parallel.mesh import make_mesh
from pallas_kernels.products.weights import is_weight
from pallas_kernels.quantization.int4 import Int4
from pallas_kernels.quantization.quantized import Quantized, dequantize
from tests.golden.weights import Golden, max_model_len, write_model
from tests.models.test_golden import DenseCausal

FAMILIES = ["llama_tied", "gemma2", "gpt2", "mixtral"]
LATER = [
    "llama_gqa", "qwen3_tied", "opt_350m", "phi3_window", "qwen3_moe", "qwen3_next", "olmo2", "glm4",
    "stablelm_parallel", "phi",
]  # fmt: skip
LATER += ["gpt_neox", "falcon_40b"]


def logits(model: Model, params: Params, tokens: np.ndarray) -> np.ndarray:
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(len(tokens))
        module = model.bind(params)
        return module.logits(module.hidden(tokens, positions, DenseCausal(jnp.zeros_like(tokens), positions)))

    return np.asarray(jax.jit(run)(params, tokens))


def models(
    folder: Path, variant: str, quantization: str, devices: int = 1
) -> tuple[tuple[Model, Params], tuple[Model, Params]]:
    """The quantized model, and the plain one with dequantized weights."""
    write_model(folder, variant)
    config, mesh = read_config(folder), make_mesh(devices)
    model = build(config, "float32", max_model_len(variant), quantization)
    params = load(folder, model, mesh, progress=False)

    def plain(leaf: Any) -> Any:
        return dequantize(leaf) if is_weight(leaf) else leaf

    widened = jax.jit(lambda params: jax.tree.map(plain, params, is_leaf=is_weight))(params)
    return (model, params), (build(config, "float32", max_model_len(variant)), widened)


def quantized(params: Params) -> list[Quantized]:
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Quantized))
    return [leaf for leaf in leaves if isinstance(leaf, Quantized)]


@pytest.mark.parametrize(
    "variant", [*FAMILIES, *(pytest.param(variant, marks=pytest.mark.full) for variant in LATER)]
)
def test_int8_weights(variant: str, tmp_path: Path) -> None:
    mine, plain = models(tmp_path, variant, "int8")
    tokens = Golden.read(variant).cases[0].prompt
    np.testing.assert_allclose(logits(*mine, tokens), logits(*plain, tokens), atol=1e-4)


@pytest.mark.parametrize("variant", ["llama_gqa", "mixtral"])
@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "fp8"])
def test_activations_too(quantization: str, variant: str, tmp_path: Path) -> None:
    """Near the model with the same weights, and not equal to it."""
    mine, plain = models(tmp_path, variant, quantization)
    tokens = Golden.read(variant).cases[0].prompt
    got, want = logits(*mine, tokens), logits(*plain, tokens)
    error = np.abs(got - want).mean() / want.std()
    assert 1e-5 < error < (0.25 if quantization == "fp8" else 0.05)


@pytest.mark.parametrize(
    "variant",
    ["mixtral", *(pytest.param(variant, marks=pytest.mark.full) for variant in ("llama_gqa", "gpt2"))],
)
def test_int4_weights(variant: str, tmp_path: Path) -> None:
    mine, plain = models(tmp_path, variant, "int4")
    tokens = Golden.read(variant).cases[0].prompt
    np.testing.assert_allclose(logits(*mine, tokens), logits(*plain, tokens), atol=1e-4)
    params = mine[1]
    vocabulary = params.get("embed", params.get("wte"))
    assert isinstance(vocabulary, Quantized) and not vocabulary.inputs  # which bears four bits less well
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    assert any(isinstance(leaf, Int4) for leaf in leaves)


def test_what_is_weight(tmp_path: Path) -> None:
    """Every matrix of products and embeddings; no router, norm or bias."""
    (_, params), _ = models(tmp_path, "mixtral", "int8")
    layer = params["layers"][0]
    matrices = [params["embed"], params["lm_head"], layer["attention"]["qkv"], layer["attention"]["o"]]
    matrices += [layer["mlp"]["gate_up"], layer["mlp"]["down"]]
    assert all(isinstance(leaf, Quantized) and leaf.values.dtype == jnp.int8 for leaf in matrices)
    assert layer["mlp"]["gate_up"].scale.shape == layer["mlp"]["gate_up"].values.shape[:-1]
    assert not isinstance(layer["mlp"]["router"], Quantized)
    assert len(quantized(params)) == 2 + 4 * len(params["layers"])


@pytest.mark.parametrize("variant", ["llama_gqa", pytest.param("llama_tied", marks=pytest.mark.full)])
def test_fp8_leaves_the_vocabulary_to_int8(variant: str, tmp_path: Path) -> None:
    """Logits lose much if the head's weights and inputs are rounded to e4m3."""
    write_model(tmp_path, variant)
    params = build(read_config(tmp_path), "bfloat16", 64, "fp8").params
    for name in {"embed", "lm_head"} & params.keys():
        assert (params[name].kind, params[name].inputs, params[name].hadamard) == ("int8", False, 1)
    layer = params["layers"][0]
    assert {(leaf.kind, leaf.inputs) for leaf in quantized(layer)} == {("float8_e4m3fn", True)}
