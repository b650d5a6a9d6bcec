"""Quantized weights and caches through the engine."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jengine.config import EngineConfig
from jengine.engine.engine import Engine
from jengine.errors import InvalidArgument
from jengine.request import SamplingParams
from tests.engine.running import limit_pages, prompts, run
from tests.golden.weights import Golden

WORK = [(prompt, SamplingParams(temperature=0.0, max_tokens=24)) for prompt in prompts(8, vocab=96, longest=140, seed=3)]


@pytest.mark.filterwarnings("ignore:kv_cache_dtype='fp8' is emulated")
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "w8a8", "kv_cache_dtype": "int8"},
        pytest.param({"quantization": "int8", "kv_cache_dtype": "fp8"}, marks=pytest.mark.full),
        pytest.param({"quantization": "int4"}, marks=pytest.mark.full),
    ],
)
def test_neighbours_do_not_enter(options: dict[str, str], make_engine: Callable[..., Engine]) -> None:
    """Each token of each head has a separate scale. (Other chunk sizes may change results by rounding.)"""
    engine = make_engine(**options)
    alone = [run(engine, [work])[0].tokens for work in WORK]
    engine.reset_prefix_cache()
    assert [answer.tokens for answer in run(engine, WORK)] == alone
    assert engine.compiles_since_start == 0
    short = make_engine(**options)
    limit_pages(short, 14)
    assert [len(answer.tokens) for answer in run(short, WORK)] == [24] * len(WORK)
    assert short.scheduler.num_preemptions > 0
    assert short.compiles_since_start == 0


def test_the_cache_and_the_weights_shrink(make_engine: Callable[..., Engine]) -> None:
    def sizes(engine: Engine) -> tuple[int, int]:
        worker = engine.runner.worker  # type: ignore[attr-defined]
        return tuple(sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (worker.params, worker.cache))  # type: ignore[return-value]

    plain, small = make_engine(), make_engine(quantization="w8a8", kv_cache_dtype="int8")
    weights, cache = (after / before for before, after in zip(sizes(plain), sizes(small), strict=True))
    head_dim = plain.model.head_dim
    assert cache == (head_dim + 4) / (4 * head_dim)  # bytes of a token's head: float32 before
    assert 0.25 < weights < 0.35
    assert small.runner.spec.cache_bytes == sizes(small)[1]  # type: ignore[attr-defined]


@pytest.mark.full
def test_a_latent_cache_of_eight_bits(make_engine: Callable[..., Engine]) -> None:
    """A vector of 32 + 12 channels has a scale; the first tokens' log probabilities stay near transformers'."""
    engine, cases = make_engine("deepseek_v2", kv_cache_dtype="int8"), Golden.read("deepseek_v2").cases
    assert engine.runner.spec.page_bytes == 16 * 3 * (32 + 12 + 4)  # type: ignore[attr-defined]
    work = [(case.prompt.tolist(), SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)) for case in cases]
    for answer, case in zip(run(engine, work), cases, strict=True):
        logits = case.logits[0].astype(np.float64)
        [update] = answer.updates
        assert update.logprobs is not None
        for token, value in update.logprobs.top:
            assert abs(value - (logits[token] - np.logaddexp.reduce(logits))) < 0.3


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("quantization", "int2", "None, int4, int4_mixed, int8, w8a8, fp8, none"), ("kv_cache_dtype", "int4", "auto, int8 or fp8")],
)
def test_others_are_refused(field: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field}='{value}': must be {limit}"):
        EngineConfig.of("demo", {field: value})
