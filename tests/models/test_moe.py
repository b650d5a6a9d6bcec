"""Routing to experts: both forms against a loop over tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.checkpoints.hugging_face import model_config
from jengine.models import build
from jengine.models.moe import Experts, MixtureOfExperts
from pallas_kernels.products.weights import weight_of
from tests.golden.weights import VARIANTS

HIDDEN, FFN = 16, 24


def experts(count: int) -> Experts:
    sizes = MixtureOfExperts(layers=(0,), count=count, per_token=min(count, 2), size=FFN)
    config = dataclasses.replace(model_config(VARIANTS["mixtral"]), hidden_size=HIDDEN, parts=(sizes,))
    return Experts(config, jnp.float32, "mlp", ("w1", "w3", "w2"))


@functools.cache
def compiled(form: str, count: int) -> Callable[..., jax.Array]:
    def run(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        y: jax.Array = getattr(experts(count), form)(x, chosen, weight_of(gate_up), weight_of(down))
        return y

    return jax.jit(run)


@pytest.mark.parametrize("form", ["by_block", "by_group"])
@pytest.mark.parametrize(("count", "rows"), [(1, 5), (4, 3), (6, 40), (3, 300), (40, 16)])
@pytest.mark.parametrize("spread", ["even", "one", "ends"])
def test_each_row_goes_through_its_expert(form: str, count: int, rows: int, spread: str) -> None:
    rng = np.random.default_rng(0)
    x, gate_up, down = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((rows, HIDDEN), (count, FFN, 2, HIDDEN), (count, HIDDEN, FFN))
    )
    of = {
        "even": rng.integers(0, count, rows),
        "one": np.full(rows, count - 1),
        "ends": rng.choice([0, count - 1], rows),
    }
    chosen = of[spread]
    got = compiled(form, count)(x, chosen[:, None], gate_up, down)[:, 0]
    for i, expert in enumerate(chosen):
        gate, up = gate_up[expert, :, 0] @ x[i], gate_up[expert, :, 1] @ x[i]
        np.testing.assert_allclose(got[i], down[expert] @ (gate / (1 + np.exp(-gate)) * up), atol=2e-4)


def test_the_cpu_program_has_no_copy_of_all_experts() -> None:
    """It does not multiply by all of them either: its temporaries are far smaller than the weights."""
    graph, state = nnx.split(experts(64))

    def run(params: object, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x)  # type: ignore[no-any-return]

    compiled = (
        jax.jit(run).lower(nnx.to_pure_dict(state), jax.ShapeDtypeStruct((8, HIDDEN), jnp.float32)).compile()
    )
    weights = 64 * 3 * FFN * HIDDEN * 4
    assert compiled.memory_analysis().temp_size_in_bytes < weights / 4


def test_a_devices_part_of_an_expert_has_whole_groups() -> None:
    """96 intermediate results in groups of 32, on two devices."""
    quantized = {"intermediate_size": 96, "quantization_config": {"quant_method": "mxfp4"}}
    model = build(model_config({**VARIANTS["gpt_oss"], **quantized}), "bfloat16", 64, shards=2)
    experts = model.module.layers[0].mlp
    assert experts.own_size() == 64 == experts.down.get_value().shape[-1] // 2
