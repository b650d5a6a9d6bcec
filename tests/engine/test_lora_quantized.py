"""Adapters over quantized weights: the quantized model, and what adapters add to it in floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoints import load as load_weights
from jengine.checkpoints import read_config
from jengine.core.request import MAX_LOGPROBS, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from pallas_kernels.products.groups import Groups
from pallas_kernels.products.plain import Plain
from pallas_kernels.products.rows import Rows, array_of
from pallas_kernels.products.weight import Weight
from pallas_kernels.products.weights import is_weight, stored
from tests.engine.loras import TARGETS, load, prompts, run_adapted
from tests.engine.test_lora import LORA
from tests.golden.loras import SETTINGS, lora, write_merged
from tests.golden.weights import max_model_len, write_model
from tests.models.dense import DenseCausal

HOW: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@partial(jax.tree_util.register_dataclass, data_fields=("base", "change"), meta_fields=())
@dataclass(frozen=True)
class Changed:
    """A weight and what is added to it, a float array of its shape."""

    base: Weight
    change: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def eager(self) -> bool:
        return self.base.eager

    def product(self, x: Rows, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        array = array_of(x)
        added = jnp.dot(array, self.change.reshape(-1, self.shape[-1]).T, precision="highest")
        return self.base.product(array, dtype) + added.astype(dtype or array.dtype)

    def grouped_product(self, x: jax.Array, groups: Groups, **how: Any) -> jax.Array:
        return self.base.grouped_product(x, groups, **how) + Plain(self.change).grouped_product(
            x, groups, **how
        )

    def take(self, rows: jax.Array) -> jax.Array:
        return self.base.take(rows)

    def __getitem__(self, index: Any) -> Changed:
        return replace(self, base=self.base[index], change=self.change[index])

    def of_expert(self, expert: jax.Array, tokens: jax.Array) -> Changed:
        return self[expert]


@pytest.mark.parametrize(
    ("quantization", "variant"),
    [
        ("w8a8", "llama_gqa"),
        *(
            pytest.param(kind, variant, marks=pytest.mark.full)
            for kind in ("int8", "int4", "int4_mixed", "w8a8", "w4a8")
            for variant in ("llama_gqa", "phi3_window")
            if (kind, variant) != ("w8a8", "llama_gqa")
        ),
        pytest.param("int8", "qwen3_moe", marks=pytest.mark.full),
    ],
)
def test_what_adapters_add_is_not_quantized(
    quantization: str, variant: str, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Log probabilities of a batch with two adapters and none are those of a dense pass: over the engine's
    weights, in floats unless products quantize their inputs, plus the difference that merging makes.
    """
    options = {**LORA, **TARGETS.get(variant, {}), "quantization": quantization, "dtype": "float32"}
    engine = make_engine(variant, **options)
    # `write_merged` knows no parameters of all experts
    names = ["plain", None] if variant in TARGETS else [*SETTINGS, None]
    for name in filter(None, names):
        load(engine, name, lora(variant, name))
    work = [
        (prompt, SamplingParams(max_tokens=8, logprobs=MAX_LOGPROBS, **HOW), name)
        for prompt, name in zip(prompts(len(names), 41), names, strict=True)
    ]
    answers = run_adapted(engine, work)
    base = tmp_path / "base"
    write_model(base, variant)
    errors = []
    for answer, (prompt, _, name) in zip(answers, work, strict=True):
        logprobs = dense(engine, base, variant, name, [*prompt, *answer.tokens])[len(prompt) - 1 :]
        for update, wanted in zip(answer.updates, logprobs, strict=False):
            assert update.logprobs is not None
            assert update.token == wanted.argmax()
            errors += [abs(value - wanted[token]) for token, value in update.logprobs.top]
    # a number between two eight-bit ones may be rounded to either; CPUs round single rows to 16 bits
    limits = {"w8a8": 0.1, "w4a8": 0.25, "int4": 2e-3, "int4_mixed": 2e-3}
    assert np.median(errors) < 1e-4 and max(errors) < limits.get(quantization, 1e-4)


def dense(engine: Engine, base: Path, variant: str, name: str | None, tokens: list[int]) -> np.ndarray:
    """Log probabilities after each token [tokens, vocab]."""
    spec = engine.runner.spec  # type: ignore[attr-defined]
    leaves = engine.runner.worker.state.leaves  # type: ignore[attr-defined]
    params = jax.tree.unflatten(jax.tree.structure(spec.params), leaves)
    exact = build(read_config(base), "float32", max_model_len(variant))
    reads = [base]
    if name is not None:
        reads.append(base.with_name(name))
        write_merged(reads[-1], base, lora(variant, name))
    plain = [load_weights(folder, exact, make_mesh(1), progress=False) for folder in reads]

    def whole(parameter: Any, is_matrix: bool, merged: jax.Array, alone: jax.Array) -> Any:
        if not is_matrix:
            return parameter
        weight = stored(parameter)
        inputs = weight.format.inputs is not None
        parameter = parameter if inputs else weight.dequantized()
        return Changed(stored(parameter), merged - alone)

    changed = jax.tree.map(whole, params, spec.model.matrices, plain[-1], plain[0], is_leaf=is_weight)

    @jax.jit
    def logprobs(params: Params) -> jax.Array:
        positions = jnp.arange(len(tokens))
        attend = DenseCausal(jnp.zeros(len(tokens), jnp.int32), positions, None)
        module = spec.model.bind(params)
        hidden = module.hidden(jnp.asarray(tokens), positions, attend)
        return jax.nn.log_softmax(module.logits(hidden))

    return np.asarray(logprobs(changed))
