"""Rotary frequencies; their formulas are held against transformers by test_golden.py."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.models.config import ModelConfig
from jengine.models.rope import local_rope, rope
from pallas_kernels.elementwise.rotary import rotate_by_xla
from tests.golden.weights import VARIANTS


def config(variant: str) -> ModelConfig:
    return model_config(VARIANTS[variant])


def test_default_frequencies() -> None:
    found = rope(config("llama_mha"), 256)
    assert found.frequencies == pytest.approx([10000 ** (-i / 16) for i in range(0, 16, 2)])
    assert found.magnitude == 1.0


def test_dynamic_is_the_default_within_the_trained_context_and_stretched_beyond() -> None:
    dynamic = config("rope_dynamic_beyond")  # trained on 64 tokens
    default = dataclasses.replace(dynamic, rope=dataclasses.replace(dynamic.rope, scaling=None))
    assert rope(dynamic, 10) == rope(dynamic, 64) == rope(default, 64)
    assert (
        rope(dynamic, 192).frequencies[-1]
        < rope(dynamic, 65).frequencies[-1]
        < rope(dynamic, 64).frequencies[-1]
    )


def test_yarn_magnitudes() -> None:
    assert rope(config("rope_yarn"), 256).magnitude == pytest.approx(0.1 * np.log(4) + 1)
    assert rope(config("rope_yarn_mscale"), 256).magnitude == pytest.approx(
        (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1)
    )
    assert rope(config("rope_yarn_attention_factor"), 256).magnitude == 0.9


@pytest.mark.parametrize("variant", ["rope_yarn", "rope_yarn_mscale", "rope_yarn_attention_factor"])
def test_attn_factor_multiplies_yarns_magnitude_unless_attention_factor_is_there(variant: str) -> None:
    fields = VARIANTS[variant]
    scaling = {**fields["rope_scaling"], "attn_factor": 0.88, "extrapolation_factor": 1.0}
    expected = rope(config(variant), 256).magnitude * (0.88 if "factor" not in variant else 1)
    assert rope(model_config({**fields, "rope_scaling": scaling}), 256).magnitude == pytest.approx(expected)


def test_longrope_has_factors_for_short_and_for_long_sequences() -> None:
    found = config("phi3_longrope_beyond")  # trained on 64 tokens, stretched to 256; 12 of 16 channels rotate
    assert found.rope.scaling is not None
    plain = dataclasses.replace(found, rope=dataclasses.replace(found.rope, scaling=None))
    default = np.array(rope(plain, 64).frequencies)
    assert rope(found, 64).frequencies == pytest.approx(default / found.rope.scaling.short_factor)
    assert rope(found, 65).frequencies == pytest.approx(default / found.rope.scaling.long_factor)
    assert (
        rope(found, 64).magnitude
        == rope(found, 65).magnitude
        == pytest.approx(np.sqrt(1 + np.log(4) / np.log(64)))
    )


def test_layers_with_a_window_have_frequencies_of_their_own_where_the_model_says_so() -> None:
    gemma3 = config("gemma3")
    assert local_rope(gemma3, 256).frequencies == pytest.approx([10000 ** (-i / 24) for i in range(0, 24, 2)])
    assert rope(gemma3, 256).frequencies == pytest.approx([1000000 ** (-i / 24) / 8 for i in range(0, 24, 2)])
    stretched = config("gemma2")
    stretched = dataclasses.replace(
        stretched, rope=dataclasses.replace(stretched.rope, scaling=gemma3.rope.scaling)
    )
    assert local_rope(stretched, 256) == rope(stretched, 256) != rope(config("gemma2"), 256)


def test_channels_beyond_the_rotary_ones_stay() -> None:
    turned = rope(config("phi3_longrope_beyond"), 64)
    x = jnp.arange(2.0 * 3 * 16).reshape(2, 3, 16)
    found = rotate_by_xla(x, turned.cos_sin(jnp.array([5, 9])))
    np.testing.assert_array_equal(found[..., 12:], x[..., 12:])
    assert not np.isclose(found[..., :12], x[..., :12]).all(axis=(1, 2)).any()


def test_rotation_turns_each_pair_by_its_angle() -> None:
    turned = rope(config("llama_mha"), 256)
    x = np.random.default_rng(0).standard_normal((3, 2, 16)).astype(np.float32)
    positions = np.array([0, 1, 77], np.int32)
    found = rotate_by_xla(jnp.array(x), turned.cos_sin(jnp.array(positions)))
    angles = positions[:, None, None] * np.array(turned.frequencies)
    pairs = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)
    np.testing.assert_allclose(found, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-5)
