"""A model as a differentiable function, against recorded results of transformers and differences."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import LLM, Forward, InvalidArgument, ModelError, SamplingParams
from tests.engine.on_demand import on_demand
from tests.golden.weights import VARIANTS, Golden, max_model_len, write_model

RECURRENT = ("lfm2", "minimax", "minimax_m1", "qwen3_next", "qwen3_5")
SOME = ["llama_gqa", "gemma2"]
OTHERS = [
    pytest.param(variant, marks=pytest.mark.full)
    for variant in VARIANTS
    if variant not in SOME and not variant.startswith(RECURRENT)
]


@pytest.mark.parametrize("variant", [*SOME, *OTHERS])
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    write_model(tmp_path, variant)
    forward = Forward(tmp_path, max_model_len=max_model_len(variant))
    params = forward.load()
    logits = jax.jit(forward.logits)
    case = Golden.read(variant).cases[0]
    tokens = np.concatenate([case.prompt, case.tokens])
    found = logits(params, jnp.stack([tokens, np.roll(tokens, 1)]))[0, len(case.prompt) - 1 : -1]
    np.testing.assert_allclose(found, case.logits, atol=2e-4, rtol=2e-4)


def test_log_probabilities_are_those_of_the_engine() -> None:
    """As it reports them while it samples."""
    forward = Forward("demo", max_model_len=64)
    params = forward.load()
    work = ["def add(", "import os", "class Stack:\n    def push(self, item):"]
    with on_demand(), LLM("demo", params=params, dtype="float32", max_model_len=64, progress=False) as llm:
        outputs = llm.generate(work, SamplingParams(max_tokens=12, seed=3, logprobs=0), use_tqdm=False)
    tokens = np.zeros((len(work), 40), np.int32)
    for row, output in zip(tokens, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        row[: len(ids)] = ids
    found = jax.jit(forward.logprobs)(params, jnp.asarray(tokens))
    for row, output in zip(found, outputs, strict=True):
        start, completion = len(output.prompt_token_ids) - 1, output.outputs[0]
        each = zip(completion.token_ids, completion.logprobs or [], strict=True)
        expected = [entry[token].logprob for token, entry in each]
        np.testing.assert_allclose(row[start : start + len(expected)], expected, atol=2e-4)


def test_gradients_are_differences(tmp_path: Path) -> None:
    """Along a random direction, in every tensor."""
    write_model(tmp_path, "llama_gqa")
    forward = Forward(tmp_path, max_model_len=32)
    params = forward.load()
    tokens = jnp.arange(24).reshape(2, 12) * 7 % 96

    @jax.jit
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return forward.logprobs(params, tokens)[:, :6].sum()

    gradients = jax.jit(jax.grad(loss))(params)
    assert gradients.keys() == params.keys()
    keys = iter(jax.random.split(jax.random.key(1), len(params)))
    way = {name: jax.random.normal(next(keys), array.shape) for name, array in params.items()}
    size = sum(float(jnp.vdot(one, one)) for one in gradients.values()) ** 0.5
    for name, step in way.items():
        slope = float(jnp.vdot(gradients[name], step))
        near, far = (loss({**params, name: params[name] + by * 1e-3 * step}) for by in (1, -1))
        assert abs(slope - float(near - far) / 2e-3) < 0.02 * size, name


def test_weights_in_float32_and_activations_in_bfloat16(tmp_path: Path) -> None:
    write_model(tmp_path, "llama_gqa")
    exact, forward = (Forward(tmp_path, dtype=dtype, max_model_len=64) for dtype in ("float32", "bfloat16"))
    params, tokens = forward.load(), jnp.arange(16)[None] * 5 % 96
    assert {array.dtype for array in params.values()} == {jnp.dtype("float32")}
    gradients = jax.eval_shape(jax.grad(lambda params: forward.logprobs(params, tokens, 2.0).sum()), params)
    assert {array.dtype for array in gradients.values()} == {jnp.dtype("float32")}
    rounded, unrounded = (jax.jit(each.logprobs)(params, tokens) for each in (forward, exact))
    difference = rounded - unrounded
    assert 0 < float(jnp.abs(difference).max()) < 0.2


def test_models_without_a_differentiable_function_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "lfm2")
    with pytest.raises(ModelError, match="has no differentiable function: its layers have a recurrent state"):
        Forward(tmp_path)


def test_tensors_and_tokens_are_checked(tmp_path: Path) -> None:
    write_model(tmp_path, "llama_gqa")
    forward = Forward(tmp_path, max_model_len=16)
    params, tokens = forward.load(), jnp.zeros((1, 16), jnp.int32)
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(ModelError, match=f"^params: tensor {name}: is missing"):
        forward.logits({key: array for key, array in params.items() if key != name}, tokens)
    with pytest.raises(
        ModelError, match=rf"^params: tensor {name}: has shape \[3\]; the configuration needs"
    ):
        forward.logits({**params, name: jnp.ones(3)}, tokens)
    with pytest.raises(ModelError, match=r"^params: tensor other: is not part of this model"):
        forward.logits({**params, "other": jnp.ones(3)}, tokens)
    with pytest.raises(
        InvalidArgument, match=r"^tokens=\(1, 17\): must be \[rows, length\], at most 16 long"
    ):
        forward.logits(params, jnp.zeros((1, 17), jnp.int32))
