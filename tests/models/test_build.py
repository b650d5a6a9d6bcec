"""A model's declaration: what build returns before there are any weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.base.errors import ModelError
from jengine.checkpoints.hugging_face import model_config
from jengine.checkpoints.stored import Tensor
from jengine.checkpoints.weights import each_expert
from jengine.models import build
from jengine.models.pieces import Piece
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct, QueriesOnly
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from tests.golden.weights import VARIANTS, tensor_shapes
from tests.models.dense import DenseCausal
from tests.models.test_golden import CASES


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_checkpoint_tensor_is_declared_once_and_fills_its_parameter(variant: str) -> None:
    model = build(model_config(VARIANTS[variant]), "float32", 64)
    pieces = jax.tree.leaves(model.sources, is_leaf=lambda node: isinstance(node, Piece))
    expected = tensor_shapes(VARIANTS[variant].get("text_config", VARIANTS[variant]))
    others = () if model.text_part is None else model.text_part.skipped
    stored = {
        name: Tensor(Path(), np.zeros(shape, int))
        for name, shape in expected.items()
        if not name.startswith(others)
    }
    read = {
        name: np.asarray(tensor.array)
        for name, tensor in each_expert(stored, {piece.name for piece in pieces}).items()
    }
    for piece in pieces:
        assert piece.shape == read[piece.name].shape
        taken(read[piece.name], piece)[...] += 1
    assert all((times == 1).all() for times in read.values())

    def check(target: jax.ShapeDtypeStruct, axes: tuple[str | None, ...], source: tuple[Piece, ...]) -> None:
        filled = np.zeros(target.shape, int)
        for piece in source:
            tensor = np.empty(piece.shape)
            assert filled[piece.part].size == taken(tensor, piece).size
            filled[piece.part] += 1
        assert filled.min() == filled.max() == 1
        assert len(axes) == len(target.shape)

    jax.tree.map(check, model.params, model.axes, model.sources)


def taken(array: np.ndarray, piece: Piece) -> np.ndarray:
    """The part of a tensor that a piece takes; a view."""
    turned = array.swapaxes(-1, -2) if piece.transposed and array.ndim > 1 else array
    return turned[piece.rows][..., piece.columns]


def test_fused_shapes_and_axes() -> None:
    model = build(model_config(VARIANTS["qwen3_tied"]), "bfloat16", 64)  # 8 heads, 2 kv heads, head_dim 24
    layer, axes = model.params["layers"][1], model.axes["layers"][1]
    assert layer["attention"]["qkv"] == jax.ShapeDtypeStruct((2, (4 + 2) * 24, 64), jnp.bfloat16)
    assert layer["attention"]["o"].shape == (64, 8 * 24)
    assert layer["mlp"]["gate_up"].shape == (112, 2, 64)
    assert layer["mlp"]["down"].shape == (64, 112)
    assert model.params["embed"].shape == (96, 64)
    assert "lm_head" not in model.params
    assert axes["attention"]["qkv"] == ("kv_heads", None, None)
    assert axes["attention"]["o"] == (None, "heads")
    assert axes["mlp"]["gate_up"] == ("ffn", None, None)
    assert model.axes["embed"] == ("vocab", None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_no_arrays_closed_over(dtype: str) -> None:
    model = build(model_config(VARIANTS["qwen3_untied"]), dtype, 64)
    seen = []

    def attend(
        layer: int, qkv: Qkv | QkvProduct | QueriesOnly, rotation: Any, options: AttentionOptions
    ) -> jax.Array:
        assert not isinstance(qkv, QueriesOnly)
        assert [(part.shape, part.dtype) for part in rotation] == [((5, 12), "float32")] * 2
        q, k, v = qkv.split()
        seen.append((layer, q.shape, k.shape, v.shape, options))
        return q

    def run(params, tokens):
        module = model.bind(params)
        hidden = module.hidden(tokens, tokens, attend)
        return hidden, module.logits(hidden)

    program = jax.make_jaxpr(run)(model.params, jax.ShapeDtypeStruct((5,), jnp.int32))
    assert [(a.shape, a.dtype) for a in program.out_avals] == [((5, 64), dtype), ((5, 96), "float32")]
    assert seen == [
        (layer, (5, 8, 24), (5, 2, 24), (5, 2, 24), AttentionOptions(24**-0.5)) for layer in range(2)
    ]
    # one frequency per pair of channels; norms' epsilons
    assert max(np.size(constant) for constant in program.consts) <= 12


@pytest.mark.parametrize("variant", CASES)
def test_narrow_activations_stay_narrow(variant: str) -> None:
    model = build(model_config(VARIANTS[variant]), "bfloat16", 64)

    class Narrow(DenseCausal):
        def __call__(
            self,
            layer: int,
            qkv: Qkv | QkvProduct | QueriesOnly,
            rotation: Rotation | None,
            options: AttentionOptions,
        ) -> jax.Array:
            parts = qkv if isinstance(qkv, QueriesOnly) else qkv.split()
            assert {x.dtype for x in parts} == {jnp.dtype(jnp.bfloat16)}
            q = parts.q[..., : parts[-1].shape[-1]]  # latent values have fewer channels
            return q if rotation is None else rotate_by_xla(q, rotation)

    def run(params, tokens):
        module = model.bind(params)
        hidden = module.hidden(tokens, tokens, Narrow(tokens, tokens))
        return hidden, module.logits(hidden)

    hidden, logits = jax.eval_shape(run, model.params, jax.ShapeDtypeStruct((5,), jnp.int32))
    assert (hidden.shape, hidden.dtype) == ((5, model.config.hidden_size), jnp.bfloat16)
    assert (logits.shape, logits.dtype) == ((5, model.config.vocab_size), jnp.float32)


def test_unsupported_models_are_named() -> None:
    config = model_config(VARIANTS["llama_mha"])
    with pytest.raises(ModelError, match=r"model_type 'unheard_of' is not supported; .*llama, .*qwen3.* are"):
        build(dataclasses.replace(config, family="unheard_of"), "float32", 64)
    with pytest.raises(ModelError, match=r"hidden_act 'relu6' is not supported; .*silu.* are"):
        model_config({**VARIANTS["llama_mha"], "hidden_act": "relu6"})
