"""Quantized weights and caches through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.checkpoints import load, read_config
from jengine.core.config import EngineConfig
from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.setup.precision import CACHE_DTYPES
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from tests.engine.running import limit_pages, prompts, run
from tests.golden.weights import Golden, max_model_len, write_model
from tests.models.dense import DenseCausal

WORK = [
    (prompt, SamplingParams(temperature=0.0, max_tokens=24))
    for prompt in prompts(8, vocab=96, longest=140, seed=3)
]


@pytest.mark.filterwarnings("ignore:kv_cache_dtype='fp8' is emulated")
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "w8a8", "kv_cache_dtype": "int8"},
        pytest.param({"quantization": "int8", "kv_cache_dtype": "fp8"}, marks=pytest.mark.full),
        pytest.param({"quantization": "int4"}, marks=pytest.mark.full),
        pytest.param({"quantization": "w4a8"}, marks=pytest.mark.full),
    ],
)
def test_neighbours_do_not_enter(options: dict[str, str], make_engine: Callable[..., Engine]) -> None:
    """Each token of each head has a separate scale. (Other chunk sizes may change results by rounding.)"""
    engine = make_engine(optimized=True, **options)
    alone = [run(engine, [work])[0].tokens for work in WORK]
    engine.do(ResetPrefixCache())
    assert [answer.tokens for answer in run(engine, WORK)] == alone
    assert engine.compiles_since_start == 0
    short = make_engine(optimized=True, **options)
    limit_pages(short, 12)  # the longest request needs 11
    assert [len(answer.tokens) for answer in run(short, WORK)] == [24] * len(WORK)
    assert short.scheduler.registry.num_preemptions > 0
    assert short.compiles_since_start == 0


def test_the_cache_and_the_weights_shrink(make_engine: Callable[..., Engine]) -> None:
    def sizes(engine: Engine) -> tuple[int, int]:
        worker = engine.runner.worker  # type: ignore[attr-defined]
        return tuple(
            sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (worker.state.leaves, worker.state.cache)
        )  # type: ignore[return-value]

    plain, small = make_engine(), make_engine(quantization="w8a8", kv_cache_dtype="int8")
    weights, cache = (after / before for before, after in zip(sizes(plain), sizes(small), strict=True))
    head_dim = plain.model.head_dim
    assert cache == (head_dim + 4) / (4 * head_dim)  # bytes of a token's head: float32 before
    assert 0.25 < weights < 0.35
    assert small.runner.spec.cache_bytes == sizes(small)[1]  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:kv_cache_dtype='fp8' is emulated")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("variant", "token_bytes"),
    [
        ("deepseek_v2", 3 * (32 + 12 + 4)),  # one vector of 32 + 12 channels for each layer
        ("gemma4", 2 * 4 * (16 + 4)),  # a full layer, or two with a window and half as many channels
        ("gemma4_text", 2 * 2 * 4 * (16 + 4)),  # in full layers, two of four scales are unused
        ("bloom", 2 * 2 * 6 * (12 + 4)),
    ],
)
def test_caches_of_eight_bits(
    variant: str, token_bytes: int, kind: str, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Log probabilities are near those of a dense pass that rounds keys and values, from prompts and from
    prefix hits.
    """
    engine, cases = make_engine(variant, kv_cache_dtype=kind), Golden.read(variant).cases
    assert engine.runner.spec.page_bytes == 16 * token_bytes  # type: ignore[attr-defined]
    write_model(tmp_path, variant)
    wanted = dense_logprobs(tmp_path, variant, [case.prompt for case in cases], CACHE_DTYPES[kind])
    work = [
        (case.prompt.tolist(), SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)) for case in cases
    ]
    errors, rounding = [], []
    for _ in range(2):
        for answer, case, logprobs in zip(run(engine, work), cases, wanted, strict=True):
            [update] = answer.updates
            assert update.logprobs is not None
            exact = case.logits[0] - np.logaddexp.reduce(case.logits[0].astype(np.float64))
            errors += [abs(value - logprobs[token]) for token, value in update.logprobs.top]
            rounding += [abs(value - exact[token]) for token, value in update.logprobs.top]
    # a number between two eight-bit ones may be rounded to either
    assert np.median(errors) < 1e-4 and max(errors) < 0.05
    assert np.mean(rounding) < 0.2


def dense_logprobs(folder: Path, variant: str, prompts: list[np.ndarray], kind: str | None) -> np.ndarray:
    """Log probabilities after each prompt [prompts, vocab]; keys and values are rounded to `kind`."""
    model = build(read_config(folder), "float32", max_model_len(variant))
    lengths = [len(prompt) for prompt in prompts]
    sequence, positions = (
        np.repeat(np.arange(len(prompts)), lengths),
        np.concatenate([np.arange(length) for length in lengths]),
    )

    @jax.jit
    def logprobs(params: Params) -> jax.Array:
        module, attend = model.bind(params), DenseCausal(jnp.asarray(sequence), jnp.asarray(positions), kind)
        hidden = module.hidden(jnp.asarray(np.concatenate(prompts)), jnp.asarray(positions), attend)
        return jax.nn.log_softmax(module.logits(hidden[np.cumsum(lengths) - 1]))

    return np.asarray(logprobs(load(folder, model, make_mesh(1), progress=False)))


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("quantization", "int2", "None, int4, int4_mixed, w4a8, int8, w8a8, fp8, none"),
        ("kv_cache_dtype", "int4", "one of auto, int8, fp8"),
    ],
)
def test_others_are_refused(field: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field}='{value}': must be {limit}"):
        EngineConfig.of("demo", {field: value})
