"""Formats of weights: of options, of what checkpoints store, and the abstract parameters of both."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from jengine import cli
from jengine.base.errors import ModelError
from jengine.core.config import EngineConfig
from jengine.core.quantization import FOUR_BITS, QUANTIZATIONS, Quantization
from jengine.models.config import Converted, StoredWeights
from jengine.models.quantized import format_of
from pallas_kernels.products.weights import NUMBERS, abstract, stored
from pallas_kernels.quantization.formats import FP8, INT4, WeightFormat
from pallas_kernels.quantization.int4 import GROUPS, pack, quantize_int4
from pallas_kernels.quantization.quantized import quantize

PLAIN = jax.ShapeDtypeStruct((3, 5, 192), jnp.bfloat16)


def test_every_option_and_stored_form_has_a_format() -> None:
    assert {*QUANTIZATIONS, "none"} == {*get_args(Quantization)}
    assert FOUR_BITS == ("int4", "int4_mixed", "w4a8")
    for form in NUMBERS:
        assert format_of(StoredWeights(form=form)).numbers == form
    with pytest.raises(ModelError, match="form='int3' of stored weights must be one of int8, float8_e4m3fn,"):
        format_of(StoredWeights(form="int3"))


def test_groups_of_four_bits() -> None:
    """By default, wherever it is stated, and without offsets."""
    assert INT4.group == GROUPS[0] == Converted(quantization="int4").group_size
    assert EngineConfig.of("demo", {"quantization": "int4"}).quantization_group_size == INT4.group
    assert cli._parser().parse_args(["convert", "demo", "out"]).quantization_group_size == INT4.group
    for name in FOUR_BITS:
        assert not QUANTIZATIONS[name].matrices.offset and QUANTIZATIONS[name].matrices.group == INT4.group


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_names_are_those_of_kept_choices(name: str) -> None:
    known = {"int4_mixed": "int4", "fp8": "fp8 inputs"}
    assert QUANTIZATIONS[name].matrices.name == known.get(name, name)


@pytest.mark.parametrize(
    ("weight", "parts", "hadamard", "quantized"),
    [
        (WeightFormat("int8", 8), 1, 1, partial(quantize, dtype="int8")),
        (
            WeightFormat("int8", 8, inputs="int8"),
            1,
            64,
            partial(quantize, dtype="int8", inputs=True, hadamard=64),
        ),
        (WeightFormat(FP8, 8, inputs=FP8), 1, 1, partial(quantize, dtype=FP8, inputs=True)),
        (INT4, 2, 1, partial(quantize_int4, parts=2)),
        (WeightFormat("int4", 4, 128), 1, 1, partial(quantize_int4, group=128)),
        (
            WeightFormat("int4", 4, 64, inputs="int8"),
            1,
            64,
            partial(quantize_int4, group=64, hadamard=64, inputs=True),
        ),
        (
            WeightFormat("e2m1", 4, 32),
            1,
            1,
            lambda x: pack(x.astype(jnp.int8), x[..., ::32], None, group=32, kind="e2m1", dtype="bfloat16"),
        ),
        (WeightFormat("bfloat16", 16), 1, 1, lambda x: x),
    ],
)
def test_abstract_parameters_are_those_of_quantized_arrays(
    weight: WeightFormat, parts: int, hadamard: int, quantized: Any
) -> None:
    made, wanted = abstract(PLAIN, weight, parts=parts, hadamard=hadamard), jax.eval_shape(quantized, PLAIN)
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert stored(made).format == weight and stored(made).shape == PLAIN.shape
