"""With batch_invariant=True, a request's tokens and log probabilities are bit-identical in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jengine import InvalidArgument
from jengine.engine.loop.engine import Engine
from jengine.execution.runner import PendingSample
from jengine.scheduling.requests.batching import BatchInvariant
from jengine.scheduling.step_plan import StepPlan
from tests.engine.invariance import OPTIONS, Observed, check_invariance, differences, preempted, random_work

FULL = [
    ("llama_gqa", {"dtype": "float32"}),
    ("llama_gqa", {"dtype": "bfloat16"}),
    ("llama_gqa", {"dtype": "bfloat16", "quantization": "w8a8", "kv_cache_dtype": "int8"}),
    ("llama_gqa", {"dtype": "bfloat16", "quantization": "w4a8"}),
    ("llama_gqa", {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"}),
    ("gemma2", {"dtype": "float32"}),
    ("gemma3", {"dtype": "bfloat16"}),
    ("qwen3_moe", {"dtype": "float32"}),
    ("mixtral", {"dtype": "bfloat16"}),
    ("deepseek_v3", {"dtype": "float32"}),
    ("deepseek_v2", {"dtype": "bfloat16"}),
    ("qwen3_next", {"dtype": "bfloat16"}),
    ("lfm2", {"dtype": "float32"}),
    ("minimax", {"dtype": "bfloat16"}),
    ("gpt2", {"dtype": "float32"}),
    ("llama_gqa", {"dtype": "float32", "tile_size": 64}),
    ("llama_gqa", {"dtype": "bfloat16", "tile_size": 24}),
]


def test_whatever_runs_beside_it(make_engine: Callable[..., Engine]) -> None:
    """tests/parallel does this in float32, on two devices."""
    check_invariance(make_engine(optimized=True, dtype="bfloat16", **OPTIONS), 30)


@pytest.mark.full
@pytest.mark.parametrize(("variant", "options"), FULL)
def test_two_hundred_requests(
    variant: str, options: dict[str, Any], make_engine: Callable[..., Engine]
) -> None:
    check_invariance(make_engine(variant, optimized=True, **{**OPTIONS, **options}), 200, seed=1)


def test_where_a_resumed_sequence_is_prefilled_bits_differ(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one of the rules, tiles compute tokens that rows had generated. This shows that the tests above
    can fail.

    Tiles and rows of one model may have the same bits, depending on the processor. So steps with tiles have
    other weights here.
    """
    engine = make_engine(optimized=True, dtype="bfloat16", **OPTIONS)
    observed, work = Observed(engine), random_work(30, vocab=96, seed=0)
    begin, state = engine.runner.begin, engine.runner.worker.state
    of_rows = state.leaves
    of_tiles = [jax.device_put(0.75 * leaf, leaf.sharding) for leaf in of_rows]

    def with_weights(plan: StepPlan) -> PendingSample:
        state.put_leaves(of_tiles if plan.trunk.tiles else of_rows)
        return begin(plan)

    monkeypatch.setattr(engine.runner, "begin", with_weights)
    alone = [answer for one in work for answer in observed.answers([one])]
    assert differences(preempted(observed, work), alone) == 0
    monkeypatch.setattr(BatchInvariant, "prefilled", lambda self, sequence: len(sequence.tokens))
    assert differences(preempted(observed, work), alone) > 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_it_bits_differ(dtype: str, make_engine: Callable[..., Engine]) -> None:
    """For at least one dtype: on many processors, products never depend on the number of rows."""
    observed = Observed(make_engine(optimized=True, dtype=dtype, **{**OPTIONS, "batch_invariant": False}))
    work = random_work(30, vocab=96, seed=0)
    alone = [answer for one in work for answer in observed.answers([one])]
    together = [
        observed.answers(work, at_once=32),
        preempted(observed, work),
        observed.answers(work, at_once=7, warm=True),
    ]
    assert dtype == "float32" or sum(differences(answers, alone) for answers in together) > 0


def test_what_cannot_keep_it_is_refused(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match=r"batch_invariant.*dtype=float16"):
        make_engine(dtype="float16", **OPTIONS)
    monkeypatch.setattr("jengine.execution.spec.cpu_refused", lambda: "llvmlite is not installed")
    with pytest.raises(InvalidArgument, match=r"batch_invariant.*llvmlite is not installed"):
        make_engine(**OPTIONS)
