"""Four-bit weights calibrated on text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import cli
from jengine.base.errors import InvalidArgument
from jengine.checkpoints import calibration as subject
from jengine.checkpoints import conversion, load, load_calibrated, read_config, read_text, resolve
from jengine.checkpoints.calibration import Calibrated, _moments, halves, twice
from jengine.core.config import EngineConfig
from jengine.engine.setup.shapes import describe
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.text.tokenizer import Tokenizer
from pallas_kernels.products.groups import grouped
from pallas_kernels.products.weights import is_weight, product
from pallas_kernels.quantization import int4
from pallas_kernels.quantization.gptq import DAMPING, gptq
from pallas_kernels.quantization.hadamard import transform
from pallas_kernels.quantization.int4 import Int4, pack
from pallas_kernels.quantization.quantized import Quantized, dequantize
from tests.checkpoints.test_quantized_conversion import VARIANT, declared, restored, same
from tests.golden.weights import max_model_len, write_model
from tests.models.test_quantization import logits
from tests.text.conftest import byte_level, write

EXPERTS, OUT, IN = 4, 24, 64
MANY, FEW, NONE = 0, 1, 2  # experts, by how many rows reach them
CHUNK = 64
Reference = tuple[jax.Array, jax.Array]  # rows, and the expert of each
# As models are loaded. Outside of jit, each of its operations would be compiled for each shape.
quantize_int4 = jax.jit(int4.quantize_int4, static_argnames=("group", "hadamard", "inputs"))


def normal(seed: int, *shape: int) -> jax.Array:
    """NumPy's numbers: JAX's would be compiled for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(rows: int, size: int) -> jax.Array:
    """Correlated inputs, like activations."""
    return normal(1, rows, size // 4) @ normal(0, size // 4, size) + 0.1 * normal(2, rows, size)


@pytest.mark.full
@pytest.mark.parametrize(("size", "group"), [(200, 128), (192, 32)])
def test_products_with_such_inputs_are_nearer(size: int, group: int) -> None:
    x, weight = inputs(512, size), normal(3, 48, size)
    numbers, scale = gptq(weight, x.T @ x, group)
    assert numbers.shape == weight.shape and scale.shape == (48, -(-size // group))
    made = np.asarray(numbers) * np.repeat(np.asarray(scale), group, 1)[:, :size]
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
    numbers, scale = map(np.asarray, gptq(jnp.asarray(weight), jnp.asarray(moments, jnp.float32), 64))
    # the mean over the padded columns, too
    damped = moments + DAMPING[0] * np.diagonal(moments).sum() / 128 * np.eye(96)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest, want = weight.astype(np.float64), np.zeros((16, 96))
    for i in range(96):
        by_group = scale[:, i // 64]
        want[:, i] = np.clip(np.round(rest[:, i] / by_group), -8, 7)
        rest -= np.outer((rest[:, i] - want[:, i] * by_group) / upper[i, i], upper[i])
    assert (numbers != want).mean() < 0.005  # numbers half way between two


def test_few_inputs_mislead_little() -> None:
    """With about as many inputs as columns, errors on other inputs of the same kind stay bounded."""
    x = normal(0, 1130, 128) + normal(1, 1130, 1)
    weight = normal(2, 48, 128)
    seen, unseen = x[:130], x[130:]
    numbers, scale = gptq(weight, seen.T @ seen, 128)
    nearest = dequantize(quantize_int4(weight, group=128))
    errors = [float(jnp.square(unseen @ (weight - made).T).mean()) for made in (numbers * scale, nearest)]
    assert errors[0] < 1.7 * errors[1]  # 2.1 with a tenth of the damping


def test_moments_of_transformed_inputs() -> None:
    x = inputs(128, 48).astype(jnp.bfloat16)
    spread = np.asarray(transform(x.astype(jnp.float32), 48), np.float64)
    moments, cross = _moments(x, 48)
    np.testing.assert_allclose(moments, spread[64:].T @ spread[64:], rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(cross, spread[:64].T @ spread[64:], rtol=1e-4, atol=1e-2)


def test_moments_without_an_inverse() -> None:
    """Some inputs are always zero, or there are fewer inputs than columns."""
    x = jnp.zeros((2, 64)).at[:, :3].set(1.0)
    numbers, scale = gptq(jnp.ones((4, 64)), x.T @ x, 32)
    assert np.isfinite(np.asarray(scale)).all() and numbers.dtype == jnp.int8


def deviating(x: jax.Array) -> jax.Array:
    """Inputs of a quantized model beside those of the unquantized one: mixed a little, with some noise."""
    return 0.9 * x + x @ normal(5, IN, IN) / 50 + 0.2 * normal(6, *x.shape)


def test_outputs_are_nearer_to_those_of_the_unquantized_model() -> None:
    """On other inputs of the same kind, if inputs deviate from the unquantized model's."""
    reference, weight = inputs(1024, IN), normal(3, 48, IN)
    x = deviating(reference)
    seen, unseen = slice(512), slice(512, None)
    moments, cross = x[seen].T @ x[seen], reference[seen].T @ x[seen]
    errors = []
    for known in (cross, None):
        numbers, scale = gptq(weight, moments, 32, known)
        made = numbers * jnp.repeat(scale, 32, 1)
        errors.append(float(jnp.square(reference[unseen] @ weight.T - x[unseen] @ made.T).mean()))
    assert errors[0] < 0.8 * errors[1]


def test_inputs_that_do_not_deviate_change_nothing() -> None:
    x, weight = inputs(512, 200), normal(3, 48, 200)
    moments = x.T @ x
    for one, other in zip(gptq(weight, moments, 128), gptq(weight, moments, 128, moments), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rows", [6, 300, 1400])
@pytest.mark.parametrize("rows_too", [False, True])
def test_each_half_is_multiplied_by_its_weight(rows: int, rows_too: bool) -> None:
    """The reference by the unquantized one. In chunks or not, the last of which may have fewer rows."""
    reference, weight = inputs(rows // 2, IN), normal(3, OUT, 2, IN)
    x = jnp.concatenate([reference, deviating(reference)])
    target = quantize_int4(weight, group=32, hadamard=IN, inputs=rows_too)
    made = Calibrated(weight, target, lambda count: None)
    y, again = made.product(x), made.product(x, jnp.bfloat16)
    first, second = halves(rows)
    np.testing.assert_allclose(y[first], product(x[first], weight), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[second], product(x[second], made.result()), rtol=1e-5, atol=1e-5)
    assert np.abs(y[second] - product(x[second], weight)).max() > 0.1
    assert again.dtype == jnp.bfloat16
    np.testing.assert_allclose(again.astype(jnp.float32), y, rtol=0.01)


def test_weights_know_the_inputs_that_theirs_deviate_from() -> None:
    """A weight is fitted to the outputs of the first half; without deviation, as `gptq` fits it alone."""
    reference, weight = inputs(512, IN), normal(3, OUT, IN)
    target, x = quantize_int4(weight, group=32, hadamard=IN), deviating(reference)

    def fitted(first: jax.Array) -> jax.Array:
        made = Calibrated(weight, target, lambda count: None)
        made.product(jnp.concatenate([first, x]))
        return dequantize(made.result())

    informed, alone = fitted(reference), fitted(x)
    errors = [float(jnp.square(reference @ weight.T - x @ made.T).mean()) for made in (informed, alone)]
    assert errors[0] < 0.8 * errors[1]


def test_tokens_are_read_twice() -> None:
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    reference, quantized = (twice(tokens).reshape(-1)[half].reshape(2, 3) for half in halves(12))
    np.testing.assert_array_equal(reference, tokens)
    np.testing.assert_array_equal(quantized, tokens)


@dataclass(frozen=True)
class Routed:
    """Experts whose inputs are correlated, those of each in another way.

    Attributes:
        weight: float32 [EXPERTS, OUT, 2, IN].
        x, chosen: rows float32 [rows, IN], and the expert of each, int32 [rows].
        unseen: other inputs of each expert, and of NONE those of MANY, float32 [EXPERTS, rows, IN].
    """

    weight: jax.Array
    x: jax.Array
    chosen: jax.Array
    unseen: jax.Array

    @classmethod
    def make(cls) -> Routed:
        own = normal(0, EXPERTS, IN, IN)
        mixed = (normal(1, IN, IN) + 0.3 * own) * jnp.exp(-jnp.arange(IN) / 32)[:, None]
        every = normal(2, EXPERTS, 500, IN) @ mixed
        chosen = np.random.default_rng(0).permutation(np.repeat([MANY, FEW, 3], [250, 8, 150]))
        x, weight = (
            every[chosen, np.arange(len(chosen)) % 250],
            normal(3, EXPERTS, OUT, 2, IN),
        )
        return cls(weight, x, jnp.asarray(chosen), every[:, 250:].at[NONE].set(every[MANY, 250:]))

    def rounded(self, rows_too: bool = False) -> Int4:
        return quantize_int4(self.weight, group=32, hadamard=IN, inputs=rows_too)

    def calibrated(
        self, rows_too: bool = False, empty: float = 0.0, reference: Reference | None = None
    ) -> tuple[jax.Array, jax.Array, Int4]:
        """The products of the reference and of x, float32 [rows, OUT, 2], and the weights.

        Args:
            empty: what places without a row hold.
            reference: the unquantized model's rows, and their experts; None: x and chosen.
        """
        rows, experts = reference or (self.x, self.chosen)
        groups = grouped(jnp.concatenate([experts, self.chosen]), EXPERTS)
        both = jnp.concatenate([rows, self.x])
        x = jnp.full((len(groups.row), IN), empty).at[groups.place].set(both)
        weight = Calibrated(self.weight, self.rounded(rows_too), lambda count: None)
        y = weight.grouped_product(x, groups)[groups.place]
        first, second = halves(len(y))
        return y[first], y[second], weight.result()

    def errors(self, made: Int4) -> np.ndarray:
        """Mean squared errors of each expert's products of unseen inputs."""
        differences = [
            product(x, made[expert]) - product(x, self.weight[expert]) for expert, x in enumerate(self.unseen)
        ]
        return np.array([float(jnp.square(each).mean()) for each in differences])


@pytest.fixture(scope="module")
def routed() -> Routed:
    return Routed.make()


@pytest.mark.parametrize("rows_too", [False, True])
def test_experts_are_nearer_on_such_inputs(rows_too: bool, routed: Routed) -> None:
    """Also one that few rows reach, and one that none reach."""
    errors, nearest = (
        routed.errors(made) for made in (routed.calibrated(rows_too)[-1], routed.rounded(rows_too))
    )
    assert (errors < np.array([0.6, 0.8, 0.8, 0.65]) * nearest).all()  # 0.51, 0.71, 0.70, 0.54


def test_few_rows_of_an_expert_mislead_little(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rows of the others, the one with few rows is no nearer than rounded to nearest."""
    errors = routed.errors(routed.calibrated()[-1])
    monkeypatch.setattr(subject, "PRIOR", 0)
    assert errors[FEW] < 0.8 * routed.errors(routed.calibrated()[-1])[FEW]  # 0.65


def test_products_of_experts_are_those_of_their_weights(
    routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the unquantized ones for the reference, whose rows reach other experts and change no moments.
    Whatever places without a row hold, and in chunks or not.
    """
    monkeypatch.setattr(subject, "CHUNK", CHUNK)
    other = 3 * routed.x[::-1], jnp.roll(routed.chosen, 5).at[:20].set(NONE)
    reference, y, made = routed.calibrated(empty=jnp.nan, reference=other)
    want = jnp.einsum("ni,noki->nok", other[0], routed.weight[other[1]])
    np.testing.assert_allclose(reference, want, atol=2e-4)
    want = jnp.einsum("ni,noki->nok", routed.x, dequantize(made)[routed.chosen])
    np.testing.assert_allclose(y, want, atol=1e-4)
    assert jnp.abs(y - jnp.einsum("ni,noki->nok", routed.x, routed.weight[routed.chosen])).max() > 0.1
    monkeypatch.setattr(subject, "CHUNK", 512)
    differences = np.asarray(dequantize(routed.calibrated()[-1]) - dequantize(made))
    assert (np.abs(differences) > 1e-4).mean() < 0.01  # numbers half way between two


@pytest.mark.parametrize("variant", ["llama_tied", pytest.param("mixtral", marks=pytest.mark.full)])
def test_a_calibrated_model_is_nearer_on_such_text(variant: str, tmp_path: Path) -> None:
    """Nearer than one rounded to nearest. Matrices have four bits, the vocabulary eight."""
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
    # a third of the short text reaches each expert
    assert errors[0] < (0.95 if variant == "mixtral" else 0.9) * errors[1]


@pytest.mark.parametrize(
    "variant",
    [
        "mixtral",
        *(
            pytest.param(variant, marks=pytest.mark.full)
            for variant in (
                "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3", "ernie4_5_moe", "granitemoe", "phimoe",
                "minimax_m2", "gemma4_text",
            )
        ),
    ],
)  # fmt: skip
def test_all_four_bit_weights_are_calibrated(variant: str, tmp_path: Path) -> None:
    """None is as rounded to nearest, in any family with experts."""
    write_model(tmp_path, variant)
    config, mesh = read_config(tmp_path), make_mesh(1)
    text = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)).astype(np.int32)
    model = build(config, "float32", max_model_len(variant), "w4a8", calibrated=True)
    made, rounded = (
        load_calibrated(tmp_path, model, mesh, text, progress=False),
        load(tmp_path, model, mesh, progress=False),
    )
    pairs = zip(*(jax.tree.leaves(tree, is_leaf=is_weight) for tree in (made, rounded)), strict=True)
    four_bits = [pair for pair in pairs if isinstance(pair[0], Int4)]
    assert any(one.values.ndim > 3 for one, _ in four_bits)
    for one, other in four_bits:
        numbers = np.asarray(one.values) != np.asarray(other.values)
        assert numbers.any() and np.isfinite(np.asarray(one.scale)).all()


@pytest.mark.parametrize("variant", [VARIANT, "mixtral"])
def test_calibrated_parameters_are_as_calibrated_at_the_start(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    write_model(folder, variant)
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
    ) and loaded.weights == "int4, groups of 32, calibrated"


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
