"""Four-bit weights calibrated on text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import cli
from jengine.base.errors import InvalidArgument
from jengine.checkpoints import conversion, load, load_calibrated, read_config, read_text, resolve
from jengine.checkpoints.calibrated import _moments
from jengine.core.config import EngineConfig
from jengine.engine.shapes import describe
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.text.tokenizer import Tokenizer
from pallas_kernels.gptq import DAMPING, gptq
from pallas_kernels.hadamard import transform
from pallas_kernels.int4 import Int4, pack, quantize_int4
from pallas_kernels.quantized import Quantized, dequantize
from pallas_kernels.weights import is_weight
from tests.checkpoints.test_quantized_conversion import VARIANT, declared, restored, same
from tests.golden.weights import max_model_len, write_model
from tests.models.test_quantization import logits
from tests.text.conftest import byte_level, write


def inputs(rows: int, size: int) -> jax.Array:
    """Correlated inputs, like activations."""
    mixed = jax.random.normal(jax.random.key(0), (size // 4, size))
    return jax.random.normal(jax.random.key(1), (rows, size // 4)) @ mixed + 0.1 * jax.random.normal(
        jax.random.key(2), (rows, size)
    )


@pytest.mark.full
@pytest.mark.parametrize(("size", "group"), [(200, 128), (192, 32)])
def test_products_with_such_inputs_are_nearer(size: int, group: int) -> None:
    x, weight = inputs(512, size), jax.random.normal(jax.random.key(3), (48, size))
    numbers, scale, offset = gptq(weight, x.T @ x, group)
    assert numbers.shape == weight.shape and scale.shape == offset.shape == (48, -(-size // group))
    wide = [np.repeat(np.asarray(part), group, 1)[:, :size] for part in (scale, offset)]
    made = np.asarray(numbers) * wide[0] + wide[1]
    nearest = dequantize(quantize_int4(weight, group=group))
    errors = [float(jnp.abs(x @ (weight - other).T).mean()) for other in (made, nearest)]
    assert errors[0] < 0.6 * errors[1]


def test_columns_are_rounded_one_after_the_other() -> None:
    """The same numbers as the method's definition gives in float64. The columns fill a group and a half of a
    second.
    """
    x, weight = (
        np.asarray(inputs(512, 96), np.float64),
        np.random.default_rng(0).normal(size=(16, 96)).astype(np.float32),
    )
    moments = x.T @ x
    numbers, scale, offset = (
        np.asarray(part) for part in gptq(jnp.asarray(weight), jnp.asarray(moments, jnp.float32), 64)
    )
    # the mean over the padded columns, too
    damped = moments + DAMPING[0] * np.diagonal(moments).sum() / 128 * np.eye(96)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest, want = weight.astype(np.float64), np.zeros((16, 96))
    for i in range(96):
        by_group = scale[:, i // 64], offset[:, i // 64]
        want[:, i] = np.clip(np.round((rest[:, i] - by_group[1]) / by_group[0]), -8, 7)
        rest -= np.outer((rest[:, i] - want[:, i] * by_group[0] - by_group[1]) / upper[i, i], upper[i])
    assert (numbers != want).mean() < 0.005  # numbers half way between two


def test_few_inputs_mislead_little() -> None:
    """With about as many inputs as columns, errors on other inputs of the same kind stay bounded."""
    x = jax.random.normal(jax.random.key(0), (1130, 128)) + jax.random.normal(jax.random.key(1), (1130, 1))
    weight = jax.random.normal(jax.random.key(2), (48, 128))
    seen, unseen = x[:130], x[130:]
    numbers, scale, offset = gptq(weight, seen.T @ seen, 128)
    nearest = dequantize(quantize_int4(weight, group=128))
    errors = [
        float(jnp.square(unseen @ (weight - made).T).mean()) for made in (numbers * scale + offset, nearest)
    ]
    assert errors[0] < 1.7 * errors[1]  # 2.1 with a tenth of the damping


def test_moments_of_transformed_inputs() -> None:
    x = inputs(64, 48).astype(jnp.bfloat16)
    spread = np.asarray(transform(x.astype(jnp.float32), 48), np.float64)
    np.testing.assert_allclose(_moments(x, 48), spread.T @ spread, rtol=1e-4, atol=1e-2)


def test_moments_without_an_inverse() -> None:
    """Some inputs are always zero, or there are fewer inputs than columns."""
    x = jnp.zeros((2, 64)).at[:, :3].set(1.0)
    numbers, scale, _ = gptq(jnp.ones((4, 64)), x.T @ x, 32)
    assert np.isfinite(np.asarray(scale)).all() and numbers.dtype == jnp.int8


@pytest.mark.parametrize("variant", ["llama_tied", pytest.param("mixtral", marks=pytest.mark.full)])
def test_a_calibrated_model_is_nearer_on_such_text(variant: str, tmp_path: Path) -> None:
    """Nearer than one rounded to nearest. Matrices have four bits, the vocabulary eight; experts' matrices
    are rounded to nearest.
    """
    write_model(tmp_path, variant)
    config, mesh = read_config(tmp_path), make_mesh(1)
    text = np.random.default_rng(0).integers(0, config.vocab_size, (6, 48)).astype(np.int32)
    plain, calibrated = (
        build(config, "float32", max_model_len(variant), kind, calibrated=kind == "int4")
        for kind in ("none", "int4")
    )
    want = logits(plain, load(tmp_path, plain, mesh, progress=False), text[0])
    params = load_calibrated(tmp_path, calibrated, mesh, text, progress=False)
    rounded = load(tmp_path, calibrated, mesh, progress=False)
    assert jax.tree.structure(params) == jax.tree.structure(calibrated.params)
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    assert any(isinstance(leaf, Int4) and leaf.hadamard > 1 for leaf in leaves) and isinstance(
        params["embed"], Quantized
    )
    errors = [
        np.abs(logits(*of, text[0]) - want).mean() for of in ((calibrated, params), (calibrated, rounded))
    ]
    assert errors[0] < (1.0 if variant == "mixtral" else 0.9) * errors[1]


def test_calibrated_parameters_are_as_calibrated_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    write_model(folder, VARIANT)
    config = read_config(folder)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)).astype(np.int32)
    monkeypatch.setattr(conversion, "read_text", lambda file, tokenizer: tokens)
    monkeypatch.setattr(conversion, "Tokenizer", SimpleNamespace(load=lambda folder: None))
    out = tmp_path / "out"
    cli.main(
        ["convert", str(folder), str(out), "--quantization", "int4", "--calibration-data", "text", "--quiet"]
    )
    model = declared(config, quantization="int4", calibrated=True)
    params = restored(out)
    same(params, load_calibrated(folder, model, make_mesh(1), tokens, progress=False))
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    assert any(isinstance(leaf, Int4) and leaf.hadamard > 1 for leaf in leaves)
    loaded, direct = declared(read_config(out)), model
    assert (loaded.weights, loaded.params) == (
        direct.weights,
        direct.params,
    ) and loaded.weights == "int4, groups of 128, calibrated"


def test_transformed_weights_stand_for_what_they_did() -> None:
    numbers = jnp.zeros((1, 64), jnp.int8).at[0, 0].set(1)
    ones = pack(numbers, jnp.ones((1, 1)), None, group=64, hadamard=64)
    np.testing.assert_array_equal(dequantize(ones), np.ones((1, 64)))  # the transform's first row


def test_text_is_cut_into_sequences(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(byte_level(), tmp_path))
    file = tmp_path / "text"
    file.write_text("a story " * 40_000)
    tokens = read_text(file, tokenizer)
    assert tokens.shape == (64, 512) and tokens.dtype == np.int32
    file.write_text("short")
    with pytest.raises(InvalidArgument, match=r"calibration_data=.*has \d+ tokens; at least 512 are needed"):
        read_text(file, tokenizer)
    with pytest.raises(InvalidArgument, match=r"calibration_data=.*cannot be read as text"):
        read_text(tmp_path / "missing", tokenizer)


def test_options_that_it_needs() -> None:
    with pytest.raises(
        InvalidArgument, match=r"calibration_data='a': needs quantization=int4, int4_mixed or w4a8"
    ):
        EngineConfig.of("demo", {"calibration_data": "a", "quantization": "int8"})
    model = read_config(resolve("demo"))
    config, plain = (
        EngineConfig.of("demo", {**options, "quantization": "int4"})
        for options in ({"calibration_data": "a"}, {})
    )
    one, other = (describe(each, model, make_mesh(1), Path()) for each in (config, plain))
    assert one.fingerprint() != other.fingerprint(), "programs of the one would be loaded for the other"
    with pytest.raises(InvalidArgument, match=r"tensor_parallel_size=2: must be 1 with calibration_data"):
        describe(config, model, SimpleNamespace(devices=np.array(jax.devices()[:1] * 2)), Path())  # type: ignore[arg-type]
